// Python module moe_zero._ops_cpu. Operators moe_zero::pack_, unpack_ and sum_rows_ for the CPU, against PyTorch's stable ABI. Their schemas are
// defined in moe_zero/ops/flat.py, where the fake implementations and the eager fallback live too. The module's own
// functions are the same calls without the dispatcher, for eager mode (py_view.h).
#include <Python.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "flat_cpu.h"
#include "held_tensors.h"

namespace moe_zero {
namespace {

void torch_parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, n, grain, body);
}

// Everything that can be wrong, before anything is written; then the copy.
std::string checked_pack(const Table& table, const std::vector<TensorView>& views, void* flat, int64_t flat_bytes,
                         double scale, Stats* stats) {
  const int64_t n = static_cast<int64_t>(views.size());
  std::string problem = check_tensors(table, views.data(), n);
  if (problem.empty()) problem = check_flat_size(table, flat_bytes);
  if (problem.empty()) problem = check_sources(views.data(), n, flat, flat_bytes);
  if (problem.empty()) pack_cpu(table, views.data(), flat, scale, stats, torch_parallel_for);
  return problem;
}

std::string checked_unpack(const Table& table, const std::vector<TensorView>& views, const void* flat,
                           int64_t flat_bytes, bool accumulate) {
  const int64_t n = static_cast<int64_t>(views.size());
  std::string problem = check_tensors(table, views.data(), n);
  if (problem.empty()) problem = check_flat_size(table, flat_bytes);
  if (problem.empty()) problem = check_targets(views.data(), n, flat, flat_bytes);
  if (problem.empty()) unpack_cpu(table, views.data(), flat, accumulate, torch_parallel_for);
  return problem;
}

void write_stats(const Stats& sums, void* out, DType dtype) {
  const double values[] = {sums.sum_of_squares, sums.non_finite ? 1.0 : 0.0};
  for (int i = 0; i < 2; ++i) {
    if (dtype == DType::kFloat64) {
      static_cast<double*>(out)[i] = values[i];
    } else {
      static_cast<float*>(out)[i] = static_cast<float>(values[i]);
    }
  }
}

void pack(Tensor flat, std::vector<std::optional<Tensor>> tensors, Tensor table, std::optional<Tensor> /*device_table*/,
          double scale, std::optional<Tensor> stats, std::optional<Tensor> /*workspace*/) {
  const StatsOut out(stats, flat);
  Stats sums;
  require(checked_pack(view_table(table), view_all(tensors, flat), flat.mutable_data_ptr(), view_flat(flat), scale,
                       stats ? &sums : nullptr));
  if (stats) write_stats(sums, out.data, out.dtype);
}

void unpack(std::vector<Tensor> tensors, Tensor flat, Tensor table, std::optional<Tensor> /*device_table*/,
            bool accumulate) {
  require(checked_unpack(view_table(table), view_all(tensors, flat), flat.const_data_ptr(), view_flat(flat),
                         accumulate));
}

void sum_rows(Tensor out, Tensor rows, double scale, bool accumulate, std::optional<Tensor> stats,
              std::optional<Tensor> /*workspace*/) {
  const RowsView view = view_rows(out, rows);
  Stats sums;
  const StatsOut stats_out(stats, out);
  sum_rows_cpu(rows.const_data_ptr(), view.rows_dtype, view.num_rows, view.row_numel, out.mutable_data_ptr(),
               view.out_dtype, scale, accumulate, stats ? &sums : nullptr, torch_parallel_for);
  if (stats) write_stats(sums, stats_out.data, stats_out.dtype);
}

PyObject* py_pack(PyObject*, PyObject* args) {
  PyObject *flat, *tensors, *held, *table, *device_table, *stats, *workspace;
  double scale;
  if (!PyArg_ParseTuple(args, "OOOOOdOO", &flat, &tensors, &held, &table, &device_table, &scale, &stats, &workspace)) {
    return nullptr;
  }
  py::Call call;
  if (!call.read_flat(flat, py::kCpu) || !read_views(&call, tensors, held) || !call.read_table(table) ||
      !call.read_stats(stats)) {
    Py_RETURN_FALSE;
  }
  Stats sums;
  PyThreadState* state = PyEval_SaveThread();
  const std::string problem = checked_pack(call.table, call.views, call.flat_data(), call.flat_bytes, scale,
                                           call.stats ? &sums : nullptr);
  PyEval_RestoreThread(state);
  if (!problem.empty()) return py::value_error(problem);
  if (call.stats) write_stats(sums, call.stats, call.stats_dtype);
  Py_RETURN_TRUE;
}

PyObject* py_unpack(PyObject*, PyObject* args) {
  PyObject *flat, *tensors, *held, *table, *device_table;
  int accumulate;
  if (!PyArg_ParseTuple(args, "OOOOOp", &flat, &tensors, &held, &table, &device_table, &accumulate)) return nullptr;
  py::Call call;
  if (!call.read_flat(flat, py::kCpu) || !read_views(&call, tensors, held) || !call.read_table(table)) Py_RETURN_FALSE;
  PyThreadState* state = PyEval_SaveThread();
  const std::string problem =
      checked_unpack(call.table, call.views, call.flat_data(), call.flat_bytes, accumulate != 0);
  PyEval_RestoreThread(state);
  if (!problem.empty()) return py::value_error(problem);
  Py_RETURN_TRUE;
}

PyObject* py_kernels(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "|z", &name)) return nullptr;
  if (name && !select_cpu_kernels(name)) {
    return py::value_error(std::string("kernels is '") + name +
                           "'; known: auto, plain and, where the processor has them, avx2 and avx512");
  }
  return PyUnicode_FromString(cpu_kernels().name);
}

PyMethodDef methods[] = {
    {"init", py::init, METH_VARARGS, "init(Tensor, Parameter) -> bool: whether eager calls can skip the dispatcher."},
    {"pack", py_pack, METH_VARARGS,
     "pack(flat, tensors, held, table, device_table, scale, stats, workspace) -> bool: False if the dispatcher has to take the call."},
    {"unpack", py_unpack, METH_VARARGS,
     "unpack(flat, tensors, held, table, device_table, accumulate) -> bool: False if the dispatcher has to take the call."},
    {"own", own, METH_VARARGS, "own(address) -> capsule: frees what moe_zero::hold returned when it goes."},
    {"kernels", py_kernels, METH_VARARGS, "kernels(select=None) -> str: the instruction set in use, after selecting one."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "moe_zero._ops_cpu", "CPU backend of the flat buffer.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CompositeExplicitAutograd, m) { m.impl("hold", TORCH_BOX(&hold)); }

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("pack_", TORCH_BOX(&pack));
  m.impl("unpack_", TORCH_BOX(&unpack));
  m.impl("sum_rows_", TORCH_BOX(&sum_rows));
}

}  // namespace moe_zero

PyMODINIT_FUNC PyInit__ops_cpu() { return PyModule_Create(&moe_zero::module); }
