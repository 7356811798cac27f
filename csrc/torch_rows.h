// What the experts' operators share: rows of torch::stable tensors as fp32 or fp64, new tensors, threads.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "flat_cpu.h"
#include "moe_cpu.h"
#include "torch_view.h"

namespace moe_zero {

// Runs body(begin, end) over [0, n) in threads that each have at least some 20 us of work; `cost` is that of one item in
// elements touched.
template <typename Body>
void parallel(int64_t n, int64_t cost, const Body& body) {
  if (n == 0) return;
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(1, cost)), body);
}

// Fresh memory costs a page fault every 4 KiB, which can be a third of an operator's time: asks Linux for pages of 2 MiB.
inline void ask_for_huge_pages(void* data, int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 4096;
  if (bytes < int64_t{4} << 20) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data), begin = address / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), (address + bytes + kPage - 1) / kPage * kPage - begin, MADV_HUGEPAGE);
#endif
}

inline Tensor new_tensor(const std::vector<int64_t>& sizes, int32_t dtype_code) {
  int64_t strides[8], stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(1, sizes[d]);
  }
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides,
                                                         dtype_code, aoti_torch_device_type_cpu(), 0, &out));
  const Tensor tensor(out);
  ask_for_huge_pages(tensor.data_ptr(), stride * static_cast<int64_t>(tensor.element_size()));
  return tensor;
}

// What an operator returns in the place of a gradient that nobody needs has no elements.
inline Tensor new_or_empty(bool needed, const std::vector<int64_t>& sizes, int32_t dtype_code) {
  return new_tensor(needed ? sizes : std::vector<int64_t>{0}, dtype_code);
}

inline int32_t dtype_code(const Tensor& tensor) {
  int32_t code = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

template <typename T>
int32_t code_of() {
  return std::is_same_v<T, double> ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32;

inline bool is_double(const Tensor& tensor) { return dtype_code(tensor) == aoti_torch_dtype_float64(); }
inline bool is_double(const std::optional<Tensor>& tensor) { return tensor && is_double(*tensor); }

template <typename T>
std::unique_ptr<T[]> scratch(int64_t n) {
  return std::unique_ptr<T[]>(new T[std::max<int64_t>(1, n)]);  // not cleared
}

// A tensor of floats whose last dimension lies densely, as rows of T at any element offset.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : tensor_(tensor) {
    const int64_t dims = tensor.dim();
    if (dims > 0 && tensor.size(dims - 1) > 1 && tensor.stride(dims - 1) != 1) tensor_ = torch::stable::contiguous(tensor);
    if (!view_dtype(tensor_, &dtype_)) require("a tensor has a dtype other than float64, float32, float16 and bfloat16");
    data_ = static_cast<char*>(tensor_.data_ptr());
    item_ = dtype_size(dtype_);
  }

  int64_t stride(int64_t dim) const { return tensor_.stride(dim); }
  DType dtype() const { return dtype_; }

  template <typename T>
  bool direct() const {
    return dtype_ == kDTypeOf<T>;
  }

  // n elements from `offset` on; they are in `buffer` only if they had to be converted.
  template <typename T>
  const T* read(int64_t offset, int64_t n, T* buffer) const {
    const char* source = data_ + offset * item_;
    if (direct<T>()) return reinterpret_cast<const T*>(source);
    copy(dtype_, source, kDTypeOf<T>, buffer, n);
    return buffer;
  }

  // The same, always in `buffer`.
  template <typename T>
  void read_into(int64_t offset, int64_t n, T* buffer) const {
    copy(dtype_, data_ + offset * item_, kDTypeOf<T>, buffer, n);
  }

  // Where to write n elements that go to `offset`; followed by wrote().
  template <typename T>
  T* target(int64_t offset, T* buffer) const {
    return direct<T>() ? reinterpret_cast<T*>(data_ + offset * item_) : buffer;
  }

  template <typename T>
  void wrote(const T* values, int64_t offset, int64_t n) const {
    char* out = data_ + offset * item_;
    if (reinterpret_cast<const char*>(values) != out) copy(kDTypeOf<T>, values, dtype_, out, n);
  }

 private:
  static void copy(DType from, const void* source, DType to, void* target, int64_t n) {
    cpu_kernels().copy[static_cast<int>(from)][static_cast<int>(to)](source, target, n, CopyArgs(), nullptr);
  }

  Tensor tensor_;
  DType dtype_;
  char* data_;
  int64_t item_;
};

// A whole small tensor as dense T: in place where it already is.
template <typename T>
class Dense {
 public:
  explicit Dense(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    tensor_ = torch::stable::contiguous(*tensor);
    const Rows rows(*tensor_);
    if (!rows.direct<T>()) buffer_ = scratch<T>(tensor_->numel());
    data_ = rows.read<T>(0, tensor_->numel(), buffer_.get());
  }

  const T* get() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  std::optional<Tensor> tensor_;
  std::unique_ptr<T[]> buffer_;
  const T* data_ = nullptr;
};

}  // namespace moe_zero
