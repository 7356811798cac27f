// What the backends need to know of a tensor: address, dtype, geometry. And the checks of a whole call, which
// run before anything is written, for every backend alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flat_plan.h"
#include "flat_table.h"

namespace moe_zero {

constexpr int kMaxDims = 64;  // as in torch

// Dimensions in row-major order with those of size 1 dropped and those that can be merged merged, so that a dense
// tensor has at most one, of stride 1.
struct TensorView {
  void* data = nullptr;  // nullptr: the tensor is absent (None), and stands for zeros
  bool present = false;
  DType dtype = DType::kFloat32;
  int64_t numel = 0;
  int ndim = 0;
  bool dense = true;
  std::vector<int64_t> sizes;  // of a tensor that is not dense
  std::vector<int64_t> strides;

  void set_geometry(const int64_t* all_sizes, const int64_t* all_strides, int all_dims);
  // Elements between the lowest and the highest address of the tensor, both included.
  void extent(int64_t* below, int64_t* above) const;
};

// Each returns an empty string, or what is wrong.
std::string check_tensors(const Table& table, const TensorView* tensors, int64_t num_tensors);
std::string check_flat_size(const Table& table, int64_t flat_bytes);
// Sources may alias each other, but not the buffer that is written.
std::string check_sources(const TensorView* tensors, int64_t num_tensors, const void* flat, int64_t flat_bytes);
// Targets may share no element with each other, within themselves, or with the buffer that is read.
std::string check_targets(const TensorView* tensors, int64_t num_tensors, const void* flat, int64_t flat_bytes);

}  // namespace moe_zero
