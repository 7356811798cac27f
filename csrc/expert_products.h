// What the operators on the experts' weights share: parameters in a stack or a list, views, products.
//
// Products are torch's (MKL, oneDNN), but for a handful of rows times transposed weights, which MKL would pack at more cost
// than the product's.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "torch_rows.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <cpuid.h>
#endif

namespace moe_zero {

using Tensors = std::vector<Tensor>;

// Rows up to which the products with transposed weights are ours.
inline constexpr int64_t kFewRows = 16;

// `offset` counts from the tensor's own first element.
inline Tensor view_at(const Tensor& tensor, int64_t offset, const std::vector<int64_t>& sizes,
                      const std::vector<int64_t>& strides) {
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset, &out));
  return Tensor(out);
}

// Rows [begin, begin + n) of a matrix.
inline Tensor row_range(const Tensor& matrix, int64_t begin, int64_t n) {
  return view_at(matrix, begin * matrix.stride(0), {n, matrix.size(1)}, {matrix.stride(0), matrix.stride(1)});
}

inline Tensor column_range(const Tensor& matrix, int64_t begin, int64_t n) {
  return view_at(matrix, begin * matrix.stride(1), {matrix.size(0), n}, {matrix.stride(0), matrix.stride(1)});
}

inline Tensor transposed(const Tensor& matrix) {
  return view_at(matrix, 0, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

inline int64_t num_experts(const Tensors& weights) {
  return weights.size() == 1 ? weights[0].size(0) : static_cast<int64_t>(weights.size());
}

// The parameter of one expert, from a stacked tensor or from one of the list.
inline Tensor expert(const Tensors& weights, int64_t e) {
  if (weights.size() > 1) return weights[e];
  const Tensor& all = weights[0];
  const auto sizes = all.sizes(), strides = all.strides();
  return view_at(all, e * all.stride(0), {sizes.begin() + 1, sizes.end()}, {strides.begin() + 1, strides.end()});
}

inline bool is_16_bit(int32_t code) {
  return code == aoti_torch_dtype_bfloat16() || code == aoti_torch_dtype_float16();
}

// Whether torch multiplies matrices of this dtype at least as fast as fp32 ones. A processor without 16-bit products takes
// eight times as long over them (measured with AVX2), beside which conversions to fp32 and back are cheap.
inline bool multiplies_fast(int32_t code) {
#ifdef MOE_ZERO_X86_KERNELS
  const bool avx512 = std::string_view(cpu_kernels().name) == "avx512";
  if (code == aoti_torch_dtype_bfloat16()) return avx512;
  if (code == aoti_torch_dtype_float16()) {
    static const bool fp16 = [] {
      unsigned a = 0, b = 0, c = 0, d = 0;
      return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);  // AVX512-FP16
    }();
    return avx512 && fp16;
  }
#endif
  return true;
}

// A copy in fp32, in the same order in memory.
inline Tensor widened(const Tensor& tensor) {
  const bool flipped = tensor.dim() == 2 && tensor.stride(0) < tensor.stride(1);
  const Tensor& source = flipped ? transposed(tensor) : tensor;
  Tensor out = new_tensor({source.sizes().begin(), source.sizes().end()}, aoti_torch_dtype_float32());
  torch::stable::copy_(out, source);
  return flipped ? transposed(out) : out;
}

// Columns or rows of a product that one thread computes at the least.
inline constexpr int64_t kPart = 64;

// out = a b (+ added, which is a row of biases or out itself).
inline void mm(const Tensor& a, const Tensor& b, const Tensor& out, const std::optional<Tensor>& added = std::nullopt) {
  const int32_t code = dtype_code(out);
  if (!multiplies_fast(code)) {
    const Tensor wide = new_tensor({out.size(0), out.size(1)}, aoti_torch_dtype_float32());
    mm(widened(a), widened(b), wide, added ? std::optional(widened(*added)) : std::nullopt);
    Tensor target = out;
    torch::stable::copy_(target, wide);
    return;
  }
  if (added) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), added->get(), a.get(), b.get(), 1.0, 1.0));
    return;
  }
  const auto product = [](const Tensor& left, const Tensor& right, const Tensor& result) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(result.get(), left.get(), right.get()));
  };
  // MKL divides a product of few rows or columns badly among threads: up to 1.5 times as fast (measured) is a product for
  // each thread. 16-bit products are oneDNN's.
  const bool by_rows = out.size(0) > out.size(1);
  const int64_t length = out.size(!by_rows), parts = length / kPart;
  if (parts < 2 || is_16_bit(code)) return product(a, b, out);
  parallel(parts, kPart * out.size(by_rows) * a.size(1) / 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPart, count = (end == parts ? length : end * kPart) - first;
    if (by_rows) {
      product(row_range(a, first, count), b, row_range(out, first, count));
    } else {
      product(a, column_range(b, first, count), column_range(out, first, count));
    }
  });
}

// oneDNN's fp32 product as the compiler of torch calls it. Weak: a build of torch without oneDNN lacks it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, const char* attribute, const double** scalars,
    int64_t num_scalars, const char** algorithm, AtenTensorHandle* out);

// On AMD's processors oneDNN multiplies fp32 matrices 8 to 15 % faster than MKL (measured on Zen 4).
inline bool prefers_onednn(const Tensor& x, const Tensor& w) {
#ifdef MOE_ZERO_X86_KERNELS
  static const bool amd = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0, &a, &b, &c, &d) && c == signature_AMD_ecx;
  }();
  return amd && aoti_torch_cpu__linear_pointwise && dtype_code(x) == aoti_torch_dtype_float32() &&
         x.size(0) > kFewRows && w.stride(1) == 1 && w.stride(0) == w.size(1);
#else
  return false;
#endif
}

// x w^T in a tensor of its own.
inline Tensor onednn_product(const Tensor& x, const Tensor& w) {
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu__linear_pointwise(x.get(), w.get(), nullptr, "none", nullptr, 0, nullptr, &out));
  return Tensor(out);
}

inline bool dense_rows(const Tensor& matrix) { return matrix.stride(1) == 1 || matrix.size(1) == 1; }

// out = x w^T + b for a handful of rows, in fp32: what has another dtype is converted in cache, block by block.
inline void affine_of_few_rows(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, const Tensor& out) {
  constexpr int64_t kBlock = 16;
  const int64_t n = x.size(0), width = w.size(0), inner = w.size(1);
  const MoeKernels<float>& kernels = moe_kernels<float>();
  const Dense<float> rows(x), bias(b);
  const Rows weights(w), target(out);
  const bool direct = weights.direct<float>();
  parallel((width + kBlock - 1) / kBlock, kBlock * inner, [&](int64_t begin, int64_t end) {
    const auto buffer = scratch<float>(direct ? 0 : kBlock * inner), sums = scratch<float>(n * kBlock);
    for (int64_t first = begin * kBlock; first < std::min(width, end * kBlock); first += kBlock) {
      const int64_t count = std::min(kBlock, width - first), start = first * w.stride(0);
      const float* const block = weights.read<float>(start, 0, buffer.get());
      for (int64_t j = 0; !direct && j < count; ++j) {
        weights.read_into(start + j * w.stride(0), inner, buffer.get() + j * inner);
      }
      kernels.dot_rows(rows.get(), inner, n, block, direct ? w.stride(0) : inner, count, inner, sums.get(), kBlock);
      for (int64_t i = 0; i < n; ++i) {
        if (bias) kernels.add_scaled(bias.get() + first, 1, count, sums.get() + i * kBlock);
        target.wrote(sums.get() + i * kBlock, i * width + first, count);
      }
    }
  });
}

// out = x w^T + b: [n, in] times [out, in].
inline void affine(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, const Tensor& out) {
  const int32_t code = dtype_code(x);
  const bool ours = code == aoti_torch_dtype_float32() || !multiplies_fast(code);
  if (ours && x.size(0) <= kFewRows && dense_rows(w)) return affine_of_few_rows(x, w, b, out);
  mm(x, transposed(w), out, b);
}

// What the caller's own pass over a product has to read and to add.
template <typename C>
struct Affine {
  Tensor rows;
  Dense<C> bias;
};

// The same, but that the bias is left to the caller's pass, for torch would add it in a pass of its own, and that the
// product may lie elsewhere than in `out`. A 16-bit product has the bias added before it is rounded, and leaves none.
template <typename C>
Affine<C> affine_without_bias(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, const Tensor& out) {
  if (prefers_onednn(x, w)) return {onednn_product(x, w), Dense<C>(b)};
  const bool leaves = dtype_code(out) == code_of<C>();
  affine(x, w, leaves ? std::nullopt : b, out);
  return {out, Dense<C>(leaves ? b : std::nullopt)};
}

// Adds up `count` rows of sums, in order and in place, and writes the result to row e of out.
template <typename C>
void reduce_rows(C* sums, int64_t count, int64_t width, const Tensor& out, int64_t e) {
  for (int64_t i = 1; i < count; ++i) moe_kernels<C>().add_scaled(sums + i * width, 1, width, sums);
  Rows(out).wrote(sums, e * width, width);
}

inline int64_t read_id(const void* data, int32_t code, int64_t i) {
  if (code == aoti_torch_dtype_int64()) return static_cast<const int64_t*>(data)[i];
  if (code == aoti_torch_dtype_int32()) return static_cast<const int32_t*>(data)[i];
  if (code == aoti_torch_dtype_int16()) return static_cast<const int16_t*>(data)[i];
  if (code == aoti_torch_dtype_int8()) return static_cast<const int8_t*>(data)[i];
  return static_cast<const uint8_t*>(data)[i];
}

inline std::optional<Tensor> bias_of(const Tensors& biases, int64_t e) {
  return biases.empty() ? std::nullopt : std::optional(expert(biases, e));
}

// Integers of any dtype, which must be in [0, size).
inline std::vector<int64_t> read_ids(const char* name, const Tensor& tensor, int64_t size, const std::string& of) {
  const Tensor dense = torch::stable::contiguous(tensor);
  const void* data = dense.const_data_ptr();
  const int32_t code = dtype_code(dense);
  std::vector<int64_t> ids(dense.numel());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = read_id(data, code, static_cast<int64_t>(i));
  if (ids.empty()) return ids;
  const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
  if (*low < 0 || *high >= size) {
    require(std::string(name) + " range from " + std::to_string(*low) + " to " + std::to_string(*high) + "; " + of +
            "they must be in [0, " + std::to_string(size) + ")");
  }
  return ids;
}

inline void fill_zero(const Tensor& tensor, int64_t begin, int64_t n) {
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  char* const target = static_cast<char*>(tensor.mutable_data_ptr()) + begin * item;
  parallel(n, 1, [&](int64_t first, int64_t last) { memset(target + first * item, 0, (last - first) * item); });
}

}  // namespace moe_zero
