// What the backends need to know of a tensor: address, dtype, geometry. And the checks of a whole call, which
// run before anything is written, for every backend alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flat_plan.h"
#include "flat_table.h"

namespace moe_zero {

constexpr int kMaxDims = 64;  // as in torch

// Dimensions of a tensor that is not dense, in row-major order, those of size 1 dropped and those that can be merged
// merged: at least one is left.
struct Geometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  int ndim() const { return static_cast<int>(sizes.size()); }
};

// Small, because a call makes one for every tensor.
struct TensorView {
  void* data = nullptr;
  int64_t numel = 0;
  std::unique_ptr<Geometry> geometry;  // nullptr: elements lie densely in row-major order
  DType dtype = DType::kFloat32;
  bool present = false;  // false: None, which stands for zeros

  bool dense() const { return !geometry; }
  // Sets numel and geometry. With strides == nullptr the tensor is dense.
  void set_geometry(const int64_t* sizes, const int64_t* strides, int ndim);
  // The lowest and the highest element in memory, relative to `data`, both included.
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
