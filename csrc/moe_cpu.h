// CPU kernels of the experts' operators: rows of fp32 or fp64 in memory, free of torch. 16-bit tensors are converted row
// by row, in cache, by the copies of flat_cpu.h.
#pragma once

#include <cstdint>

namespace moe_zero {

// `n` is always the length of a row. Rows lie densely; where there are several, ld is the distance from one to the next.
template <typename T>
struct MoeKernels {
  // out[i, j] = a[i, :] . b[j, :]
  void (*dot_rows)(const T* a, int64_t lda, int64_t rows_a, const T* b, int64_t ldb, int64_t rows_b, int64_t n, T* out,
                   int64_t ldo);
  // out[i, :] = (out[i, :] +) sum over e of coefficients[i * row_step + e * term_step] * b[e, :]
  void (*outer_rows)(const T* coefficients, int64_t row_step, int64_t term_step, int64_t rows, int64_t terms,
                     const T* b, int64_t ldb, int64_t n, T* out, int64_t ldo, bool accumulate);
  void (*scale)(const T* x, T factor, int64_t n, T* out);
  void (*add_scaled)(const T* x, T factor, int64_t n, T* out);
  T (*dot)(const T* a, const T* b, int64_t n);
  // x = exp(x - shift); returns the sum.
  T (*exp_shifted)(T* x, T shift, int64_t n);
  void (*moments)(const T* x, int64_t n, T* mean, T* variance);
  // LayerNorm of a row; bias may be null.
  void (*normalize)(const T* x, T mean, T rstd, const T* weight, const T* bias, int64_t n, T* out);
  // Its gradient of x, and what the row adds to the gradients of weight and bias.
  void (*normalize_backward)(const T* grad, const T* x, T mean, T rstd, const T* weight, int64_t n, T* out,
                             T* weight_grad, T* bias_grad);
  // out = gelu(x + bias), pre = x + bias; bias and pre may be null, and all of these places one.
  void (*gelu)(const T* x, const T* bias, int64_t n, bool tanh, T* pre, T* out);
  // act = factor * gelu(pre) unless act is null, grad_pre = factor * grad * gelu'(pre) (may be grad itself),
  // bias_grad += grad_pre unless it is null; returns the sum of grad * gelu(pre).
  T (*gelu_backward)(const T* grad, const T* pre, T factor, int64_t n, bool tanh, T* act, T* grad_pre, T* bias_grad);
};

// Of the instruction set that cpu_kernels() has selected; fp64 is plain C++ everywhere.
template <typename T>
const MoeKernels<T>& moe_kernels();

}  // namespace moe_zero
