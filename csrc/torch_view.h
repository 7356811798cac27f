// From torch::stable::Tensor to the plain views of tensor_view.h, for the operators of every backend.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "flat_copy.h"
#include "tensor_view.h"

namespace moe_zero {

using torch::stable::Tensor;

// Reaches Python as a ValueError.
inline void require(const std::string& problem) {
  if (!problem.empty()) throw std::invalid_argument(problem);
}

// False for a dtype that a flat buffer does not hold. Tensor::scalar_type() throws on the dtypes that it does not
// list, so the codes are compared instead.
inline bool view_dtype(const Tensor& tensor, DType* out) {
  int32_t code = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  static const int32_t float32 = aoti_torch_dtype_float32(), bfloat16 = aoti_torch_dtype_bfloat16(),
                       float16 = aoti_torch_dtype_float16(), float64 = aoti_torch_dtype_float64();
  if (code == float32) return *out = DType::kFloat32, true;
  if (code == bfloat16) return *out = DType::kBFloat16, true;
  if (code == float16) return *out = DType::kFloat16, true;
  if (code == float64) return *out = DType::kFloat64, true;
  return false;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  int32_t type_a = 0, type_b = 0, index_a = 0, index_b = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &type_a));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &type_b));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(a.get(), &index_a));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(b.get(), &index_b));
  return type_a == type_b && index_a == index_b;
}

inline TensorView view(const Tensor& tensor) {
  TensorView out;
  if (!view_dtype(tensor, &out.dtype)) {
    require("a tensor has a dtype other than float64, float32, float16 and bfloat16");
  }
  out.present = true;
  out.data = tensor.data_ptr();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  out.set_geometry(sizes.data(), strides.data(), static_cast<int>(sizes.size()));
  return out;
}

template <typename MaybeTensor>
std::vector<TensorView> view_all(const std::vector<MaybeTensor>& tensors, const Tensor& flat) {
  std::vector<TensorView> views(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor* tensor;
    if constexpr (std::is_same_v<MaybeTensor, Tensor>) {
      tensor = &tensors[i];
    } else {
      tensor = tensors[i] ? &*tensors[i] : nullptr;
    }
    if (!tensor) continue;
    if (!same_device(*tensor, flat)) {
      require("tensors[" + std::to_string(i) + "] and the flat buffer are on different devices");
    }
    views[i] = view(*tensor);
  }
  return views;
}

// The size in bytes of a flat buffer, which must lie densely in memory.
inline int64_t view_flat(const Tensor& flat) {
  if (!flat.is_contiguous()) require("the flat buffer is not contiguous");
  return flat.numel() * static_cast<int64_t>(flat.element_size());
}

inline Table view_table(const Tensor& table_tensor) {
  Table table;
  if (!table_tensor.is_cpu() || !Table::parse(static_cast<const int64_t*>(table_tensor.const_data_ptr()),
                                              table_tensor.numel(), &table)) {
    require("the table is not that of a FlatPlan");
  }
  return table;
}

struct RowsView {
  int64_t num_rows;
  int64_t row_numel;
  DType rows_dtype;
  DType out_dtype;
};

inline RowsView view_rows(const Tensor& out, const Tensor& rows) {
  RowsView view{};
  if (!view_dtype(rows, &view.rows_dtype) || !view_dtype(out, &view.out_dtype)) {
    require("rows and out must be float64, float32, float16 or bfloat16");
  }
  if (!same_device(out, rows)) require("rows and out are on different devices");
  if (!rows.is_contiguous() || !out.is_contiguous()) require("rows and out must be contiguous");
  if (rows.dim() != 2 || rows.size(0) < 1 || rows.size(1) != out.numel()) {
    require("rows must be [world_size, n] with world_size >= 1 and n = out.numel() = " + std::to_string(out.numel()));
  }
  view.num_rows = rows.size(0);
  view.row_numel = rows.size(1);
  TensorView source, target;
  source.dtype = view.rows_dtype;
  source.present = true;
  source.data = rows.data_ptr();
  source.numel = rows.numel();
  require(check_sources(&source, 1, out.data_ptr(), out.numel() * static_cast<int64_t>(out.element_size()))
                  .empty()
              ? ""
              : "rows and out share memory");
  return view;
}

// The optional result tensor [2]: sum of squares, and 1 if any value was inf or NaN.
struct StatsOut {
  void* data = nullptr;
  DType dtype = DType::kFloat64;

  StatsOut(const std::optional<Tensor>& stats, const Tensor& like) {
    if (!stats) return;
    if (!view_dtype(*stats, &dtype) || dtype == DType::kFloat16 || dtype == DType::kBFloat16 || stats->numel() != 2 ||
        !stats->is_contiguous() || !same_device(*stats, like)) {
      require("stats must be a float32 or float64 tensor of shape [2] on the device of the flat buffer");
    }
    data = stats->mutable_data_ptr();
  }
};

}  // namespace moe_zero
