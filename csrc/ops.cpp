// Operators moe_zero::pack_, unpack_ and sum_rows_ for the CPU, against PyTorch's stable ABI. Their schemas are
// defined in moe_zero/ops/flat.py, where the fake implementations and the eager fallback live too.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "flat_cpu.h"
#include "torch_view.h"

namespace moe_zero {
namespace {

void torch_parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, n, grain, body);
}

void pack(Tensor flat, std::vector<std::optional<Tensor>> tensors, Tensor table_tensor,
          std::optional<Tensor> /*device_table*/, double scale, std::optional<Tensor> stats) {
  const Table table = view_table(table_tensor);
  const std::vector<TensorView> views = view_all(tensors, flat);
  const int64_t flat_bytes = view_flat(flat);
  require(check_tensors(table, views.data(), views.size()));
  require(check_flat_size(table, flat_bytes));
  require(check_sources(views.data(), views.size(), flat.const_data_ptr(), flat_bytes));
  Stats sums;
  StatsOut stats_out(stats, flat);
  pack_cpu(table, views.data(), flat.mutable_data_ptr(), scale, stats ? &sums : nullptr, torch_parallel_for);
  stats_out.write(sums);
}

void unpack(std::vector<Tensor> tensors, Tensor flat, Tensor table_tensor, std::optional<Tensor> /*device_table*/,
            bool accumulate) {
  const Table table = view_table(table_tensor);
  const std::vector<TensorView> views = view_all(tensors, flat);
  const int64_t flat_bytes = view_flat(flat);
  require(check_tensors(table, views.data(), views.size()));
  require(check_flat_size(table, flat_bytes));
  require(check_targets(views.data(), views.size(), flat.const_data_ptr(), flat_bytes));
  unpack_cpu(table, views.data(), flat.const_data_ptr(), accumulate, torch_parallel_for);
}

void sum_rows(Tensor out, Tensor rows, double scale, bool accumulate, std::optional<Tensor> stats) {
  const RowsView view = view_rows(out, rows);
  Stats sums;
  StatsOut stats_out(stats, out);
  sum_rows_cpu(rows.const_data_ptr(), view.rows_dtype, view.num_rows, view.row_numel, out.mutable_data_ptr(),
               view.out_dtype, scale, accumulate, stats ? &sums : nullptr, torch_parallel_for);
  stats_out.write(sums);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("pack_", TORCH_BOX(&pack));
  m.impl("unpack_", TORCH_BOX(&unpack));
  m.impl("sum_rows_", TORCH_BOX(&sum_rows));
}

}  // namespace moe_zero
