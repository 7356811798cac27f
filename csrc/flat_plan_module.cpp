// pybind11 module moe_zero._flat_plan: the layout arithmetic for Python, without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>

#include "flat_plan.h"

namespace py = pybind11;
using moe_zero::DType;
using moe_zero::FlatPlan;

namespace {

std::vector<DType> parse_dtypes(const std::vector<std::string>& names) {
  std::vector<DType> dtypes;
  for (size_t i = 0; i < names.size(); ++i) {
    try {
      dtypes.push_back(moe_zero::dtype_from_name(names[i]));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("dtypes[" + std::to_string(i) + "]: " + error.what());
    }
  }
  return dtypes;
}

py::bytearray as_bytes(const std::vector<int64_t>& words) {
  return py::bytearray(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
}

}  // namespace

PYBIND11_MODULE(_flat_plan, m) {
  m.doc() = "Layout of tensors in a flat buffer sharded over ranks (no torch needed).";

  py::class_<FlatPlan>(m, "Layout")
      .def(py::init([](std::vector<int64_t> sizes, const std::vector<std::string>& dtypes,
                       std::vector<bool> trainable, int64_t world_size, std::optional<std::vector<int64_t>> tags,
                       std::optional<std::string> stored) {
             const size_t n = sizes.size();
             return FlatPlan(std::move(sizes), parse_dtypes(dtypes), std::move(trainable), world_size,
                             tags ? std::move(*tags) : std::vector<int64_t>(n, 0), stored.has_value(),
                             stored ? moe_zero::dtype_from_name(*stored) : DType::kFloat32);
           }),
           py::arg("sizes"), py::arg("dtypes"), py::arg("trainable"), py::arg("world_size"),
           py::arg("tags") = py::none(), py::arg("stored") = py::none())
      .def("cast",
           [](const FlatPlan& plan, const std::string& dtype, bool trainable_only) {
             return plan.cast(moe_zero::dtype_from_name(dtype), trainable_only);
           })
      .def_property_readonly("world_size", &FlatPlan::world_size)
      .def_property_readonly("sizes", [](const FlatPlan& plan) { return py::tuple(py::cast(plan.sizes())); })
      .def_property_readonly("grouping_dtypes",
                             [](const FlatPlan& plan) {
                               py::tuple names(plan.sizes().size());
                               for (size_t i = 0; i < plan.sizes().size(); ++i) {
                                 names[i] = moe_zero::dtype_name(plan.grouping_dtypes()[i]);
                               }
                               return names;
                             })
      .def_property_readonly("stored",
                             [](const FlatPlan& plan) -> py::object {
                               if (!plan.has_stored()) return py::none();
                               return py::str(moe_zero::dtype_name(plan.stored()));
                             })
      .def_property_readonly("trainable", [](const FlatPlan& plan) { return py::tuple(py::cast(plan.trainable())); })
      .def_property_readonly("tags", [](const FlatPlan& plan) { return py::tuple(py::cast(plan.tags())); })
      .def_property_readonly("groups",
                             [](const FlatPlan& plan) {
                               py::list groups;
                               for (const auto& g : plan.groups()) {
                                 groups.append(py::make_tuple(g.trainable, g.tag, moe_zero::dtype_name(g.dtype),
                                                              py::tuple(py::cast(g.members)), g.shard_numel,
                                                              g.element_offset, g.byte_offset));
                               }
                               return py::tuple(groups);
                             })
      .def_property_readonly("pieces",
                             [](const FlatPlan& plan) {
                               py::list pieces;
                               for (const auto& p : plan.pieces()) {
                                 if (p.tensor < 0) continue;
                                 pieces.append(
                                     py::make_tuple(p.tensor, p.tensor_start, p.rank, p.byte_offset, p.count));
                               }
                               return py::tuple(pieces);
                             })
      .def("shard_numel", &FlatPlan::shard_numel, py::arg("trainable"))
      .def_property_readonly("shard_bytes", &FlatPlan::shard_bytes)
      .def_property_readonly("trainable_bytes", &FlatPlan::trainable_bytes)
      .def("table", [](const FlatPlan& plan) { return as_bytes(plan.table()); })
      .def("tiles", [](const FlatPlan& plan) { return as_bytes(plan.tiles()); })
      .def("__eq__", [](const FlatPlan& a, const FlatPlan& b) { return a == b; })
      .def("__hash__", &FlatPlan::hash);
}
