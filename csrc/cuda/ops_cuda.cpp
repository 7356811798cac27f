// Python module moe_zero._ops_cuda: the CUDA backend of the operators that ops.cpp has for the CPU, with the same checks
// and the same two ways in.
#include <Python.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "flat_cuda.h"
#include "flat_tiles.h"
#include "held_tensors.h"

namespace moe_zero {
namespace {

// Words of a plan's table in device memory: header, sizes, pieces, tiles.
CudaPlan device_plan(const Table& table, const int64_t* words, int64_t num_words, int device, void* stream) {
  const int64_t* pieces = words + kTableHeader + table.num_tensors;
  const int64_t* tiles = pieces + kPieceWords * table.num_pieces;
  return CudaPlan{device, stream, reinterpret_cast<const TablePiece*>(pieces), reinterpret_cast<const Tile*>(tiles),
                  table.num_pieces == 0 ? 0 : (words + num_words - tiles) / 2};
}

std::string launch_problem(const char* error) {
  return error ? std::string("the CUDA kernel could not be launched: ") + error : "";
}

std::string checked_pack(const Table& table, const CudaPlan& plan, const std::vector<TensorView>& views, void* flat,
                         int64_t flat_bytes, double scale, const CudaStats& stats) {
  const int64_t n = static_cast<int64_t>(views.size());
  std::string problem = check_tensors(table, views.data(), n);
  if (problem.empty()) problem = check_flat_size(table, flat_bytes);
  if (problem.empty()) problem = check_sources(views.data(), n, flat, flat_bytes);
  if (problem.empty()) problem = launch_problem(pack_cuda(plan, views.data(), n, flat, scale, stats));
  return problem;
}

std::string checked_unpack(const Table& table, const CudaPlan& plan, const std::vector<TensorView>& views,
                           const void* flat, int64_t flat_bytes, bool accumulate) {
  const int64_t n = static_cast<int64_t>(views.size());
  std::string problem = check_tensors(table, views.data(), n);
  if (problem.empty()) problem = check_flat_size(table, flat_bytes);
  if (problem.empty()) problem = check_targets(views.data(), n, flat, flat_bytes);
  if (problem.empty()) problem = launch_problem(unpack_cuda(plan, views.data(), n, flat, accumulate));
  return problem;
}

void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

CudaPlan view_device_plan(const Table& table, const std::optional<Tensor>& device_table, const Tensor& flat) {
  if (!device_table || !same_device(*device_table, flat)) {
    require("the device table must be FlatPlan.device_table of the flat buffer's device");
  }
  return device_plan(table, static_cast<const int64_t*>(device_table->const_data_ptr()), device_table->numel(),
                     flat.get_device_index(), current_stream(flat));
}

CudaStats view_stats(const std::optional<Tensor>& stats, const std::optional<Tensor>& workspace, const Tensor& like,
                     int64_t num_blocks) {
  if (!stats) return {};
  const StatsOut out(stats, like);
  DType dtype = DType::kFloat32;
  if (!workspace || !view_dtype(*workspace, &dtype) || dtype != DType::kFloat64 || !same_device(*workspace, like) ||
      workspace->numel() < 2 * num_blocks) {
    require("the workspace must be float64 with 2 entries for each of the " + std::to_string(num_blocks) + " blocks");
  }
  return CudaStats{static_cast<double*>(workspace->mutable_data_ptr()), out.data, out.dtype};
}

void pack(Tensor flat, std::vector<std::optional<Tensor>> tensors, Tensor table_tensor,
          std::optional<Tensor> device_table, double scale, std::optional<Tensor> stats,
          std::optional<Tensor> workspace) {
  const Table table = view_table(table_tensor);
  const CudaPlan plan = view_device_plan(table, device_table, flat);
  require(checked_pack(table, plan, view_all(tensors, flat), flat.mutable_data_ptr(), view_flat(flat), scale,
                       view_stats(stats, workspace, flat, plan.num_tiles)));
}

void unpack(std::vector<Tensor> tensors, Tensor flat, Tensor table_tensor, std::optional<Tensor> device_table,
            bool accumulate) {
  const Table table = view_table(table_tensor);
  require(checked_unpack(table, view_device_plan(table, device_table, flat), view_all(tensors, flat),
                         flat.const_data_ptr(), view_flat(flat), accumulate));
}

void sum_rows(Tensor out, Tensor rows, double scale, bool accumulate, std::optional<Tensor> stats,
              std::optional<Tensor> workspace) {
  const RowsView view = view_rows(out, rows);
  const CudaStats sums = view_stats(stats, workspace, out, (view.row_numel + kSumRowsTile - 1) / kSumRowsTile);
  require(launch_problem(sum_rows_cuda(out.get_device_index(), current_stream(out), rows.const_data_ptr(),
                                       view.rows_dtype, view.num_rows, view.row_numel, out.mutable_data_ptr(),
                                       view.out_dtype, scale, accumulate, sums)));
}

// The plan and the stream of an eager call; false if the dispatcher has to take it.
bool read_plan(const py::Call& call, PyObject* device_table, CudaPlan* plan) {
  py::DLTensor words;
  void* stream = nullptr;
  if (!py::read(device_table, &words) || words.device_type != py::kCuda || words.device_id != call.flat.device_id ||
      words.ndim != 1 || py::api->current_stream(py::kCuda, call.flat.device_id, &stream) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto* data = reinterpret_cast<const int64_t*>(static_cast<char*>(words.data) + words.byte_offset);
  *plan = device_plan(call.table, data, words.shape[0], call.flat.device_id, stream);
  return true;
}

bool read_workspace(const py::Call& call, PyObject* object, const CudaPlan& plan, CudaStats* stats) {
  *stats = CudaStats{};
  if (!call.stats) return true;
  py::DLTensor tensor;
  DType dtype;
  if (!py::read(object, &tensor) || !py::read_dtype(tensor, &dtype) || dtype != DType::kFloat64 ||
      tensor.device_type != py::kCuda || tensor.device_id != call.flat.device_id || tensor.ndim != 1 ||
      tensor.shape[0] < 2 * plan.num_tiles) {
    return false;
  }
  char* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  *stats = CudaStats{reinterpret_cast<double*>(data), call.stats, call.stats_dtype};
  return true;
}

PyObject* py_pack(PyObject*, PyObject* args) {
  PyObject *flat, *tensors, *held, *table, *device_table, *stats_object, *workspace;
  double scale;
  if (!PyArg_ParseTuple(args, "OOOOOdOO", &flat, &tensors, &held, &table, &device_table, &scale, &stats_object, &workspace)) {
    return nullptr;
  }
  py::Call call;
  CudaPlan plan;
  CudaStats stats;
  if (!call.read_flat(flat, py::kCuda) || !read_views(&call, tensors, held) || !call.read_table(table) ||
      !call.read_stats(stats_object) || !read_plan(call, device_table, &plan) ||
      !read_workspace(call, workspace, plan, &stats)) {
    Py_RETURN_FALSE;
  }
  const std::string problem =
      checked_pack(call.table, plan, call.views, call.flat_data(), call.flat_bytes, scale, stats);
  if (!problem.empty()) return py::value_error(problem);
  Py_RETURN_TRUE;
}

PyObject* py_unpack(PyObject*, PyObject* args) {
  PyObject *flat, *tensors, *held, *table, *device_table;
  int accumulate;
  if (!PyArg_ParseTuple(args, "OOOOOp", &flat, &tensors, &held, &table, &device_table, &accumulate)) return nullptr;
  py::Call call;
  CudaPlan plan;
  if (!call.read_flat(flat, py::kCuda) || !read_views(&call, tensors, held) || !call.read_table(table) ||
      !read_plan(call, device_table, &plan)) {
    Py_RETURN_FALSE;
  }
  const std::string problem =
      checked_unpack(call.table, plan, call.views, call.flat_data(), call.flat_bytes, accumulate != 0);
  if (!problem.empty()) return py::value_error(problem);
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"init", py::init, METH_VARARGS, "init(Tensor, Parameter) -> bool: whether eager calls can skip the dispatcher."},
    {"pack", py_pack, METH_VARARGS,
     "pack(flat, tensors, held, table, device_table, scale, stats, workspace) -> bool: False if the dispatcher has to take "
     "the call."},
    {"unpack", py_unpack, METH_VARARGS,
     "unpack(flat, tensors, held, table, device_table, accumulate) -> bool: False if the dispatcher has to take the call."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "moe_zero._ops_cuda", "CUDA backend of the flat buffer.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CUDA, m) {
  m.impl("pack_", TORCH_BOX(&pack));
  m.impl("unpack_", TORCH_BOX(&unpack));
  m.impl("sum_rows_", TORCH_BOX(&sum_rows));
}

}  // namespace moe_zero

PyMODINIT_FUNC PyInit__ops_cuda() { return PyModule_Create(&moe_zero::module); }
