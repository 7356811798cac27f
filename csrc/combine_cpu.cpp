// Operators moe_zero::combine and combine_backward on the CPU; schemas and definition are in moe_zero/ops/combine.py.
//
// T tokens, K experts per token, D hidden size. C is fp32, or fp64 where the result is fp64.
#include <cmath>

#include "torch_rows.h"

namespace moe_zero {
namespace {

template <typename C>
struct Combine {
  const MoeKernels<C>& kernels = moe_kernels<C>();
  Rows y;
  Dense<C> weights;
  std::optional<Rows> residual;
  Dense<C> norm_weight, norm_bias;
  int64_t T, K, D;

  Combine(const Tensor& y_TKD, const std::optional<Tensor>& weights_TK, const std::optional<Tensor>& residual_TD,
          const std::optional<Tensor>& norm_weight_D, const std::optional<Tensor>& norm_bias_D)
      : y(y_TKD), weights(weights_TK), norm_weight(norm_weight_D), norm_bias(norm_bias_D), T(y_TKD.size(0)),
        K(y_TKD.size(1)), D(y_TKD.size(2)) {
    if (residual_TD) residual.emplace(*residual_TD);
  }

  C weight(int64_t t, int64_t k) const { return weights ? weights[t * K + k] : 1; }
  const C* expert_row(int64_t t, int64_t k, C* buffer) const {
    return y.template read<C>(t * y.stride(0) + k * y.stride(1), D, buffer);
  }

  // What the LayerNorm sees.
  void weighted_sum(int64_t t, C* out, C* buffer) const {
    kernels.scale(expert_row(t, 0, buffer), weight(t, 0), D, out);
    for (int64_t k = 1; k < K; ++k) kernels.add_scaled(expert_row(t, k, buffer), weight(t, k), D, out);
    if (residual) kernels.add_scaled(residual->template read<C>(t * residual->stride(0), D, buffer), 1, D, out);
  }
};

template <typename C>
std::tuple<Tensor, Tensor, Tensor> combine_forward(const Combine<C>& op, int32_t out_code, double eps) {
  const int64_t T = op.T, D = op.D;
  const bool normalized(op.norm_weight);
  const Tensor out = new_tensor({T, D}, out_code);
  const Tensor mean_T = new_tensor({normalized ? T : 0}, code_of<C>());
  const Tensor rstd_T = new_tensor({normalized ? T : 0}, code_of<C>());
  C* const means = static_cast<C*>(mean_T.data_ptr());
  C* const rstds = static_cast<C*>(rstd_T.data_ptr());
  const Rows out_TD(out);
  parallel(T, (op.K + 2) * D, [&](int64_t begin, int64_t end) {
    const auto sum = scratch<C>(D), buffer = scratch<C>(D);
    for (int64_t t = begin; t < end; ++t) {
      C* const target = out_TD.template target<C>(t * D, buffer.get());
      if (normalized) {
        op.weighted_sum(t, sum.get(), buffer.get());
        C variance;
        op.kernels.moments(sum.get(), D, &means[t], &variance);
        rstds[t] = 1 / std::sqrt(variance + static_cast<C>(eps));
        op.kernels.normalize(sum.get(), means[t], rstds[t], op.norm_weight.get(), op.norm_bias.get(), D, target);
        out_TD.wrote(target, t * D, D);
      } else {
        C* const direct = out_TD.template target<C>(t * D, sum.get());
        op.weighted_sum(t, direct, buffer.get());
        out_TD.wrote(direct, t * D, D);
      }
    }
  });
  return {out, mean_T, rstd_T};
}

using CombineGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
enum Need { kY = 1, kWeights = 2, kResidual = 4, kNormWeight = 8, kNormBias = 16 };

template <typename C>
CombineGrads combine_backward(const Combine<C>& op, const Tensor& grad, const Dense<C>& means, const Dense<C>& rstds,
                              const CombineGrads& grads, int64_t needs) {
  const int64_t T = op.T, K = op.K, D = op.D;
  const Rows grad_TD(grad), grad_y(std::get<0>(grads)), grad_weights(std::get<1>(grads)),
      grad_residual(std::get<2>(grads));
  const bool normalized(op.norm_weight);
  // The sums over tokens are kept by chunk and added in order, so that they do not depend on the threads.
  const int64_t rows = std::max<int64_t>(16, (T + 31) / 32), chunks = (T + rows - 1) / rows;
  const auto sums = scratch<C>(normalized ? chunks * 2 * D : 0);
  parallel(chunks, rows * (2 * K + 3) * D, [&](int64_t begin, int64_t end) {
    const auto sum = scratch<C>(D), inner = scratch<C>(D), buffer = scratch<C>(D), outer_buffer = scratch<C>(D);
    std::vector<C> weight_grads(K);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      C* const weight_sum = sums.get() + chunk * 2 * D;
      if (normalized) std::fill_n(weight_sum, 2 * D, C(0));
      for (int64_t t = chunk * rows; t < std::min(T, (chunk + 1) * rows); ++t) {
        const C* outer = grad_TD.template read<C>(t * grad_TD.stride(0), D, outer_buffer.get());
        if (normalized) {
          op.weighted_sum(t, sum.get(), buffer.get());
          op.kernels.normalize_backward(outer, sum.get(), means[t], rstds[t], op.norm_weight.get(), D, inner.get(),
                                        weight_sum, weight_sum + D);
          outer = inner.get();
        }
        if (needs & kWeights) {
          for (int64_t k = 0; k < K; ++k) weight_grads[k] = op.kernels.dot(op.expert_row(t, k, buffer.get()), outer, D);
          grad_weights.wrote(weight_grads.data(), t * K, K);
        }
        for (int64_t k = 0; k < K && needs & kY; ++k) {
          C* const target = grad_y.template target<C>((t * K + k) * D, buffer.get());
          op.kernels.scale(outer, op.weight(t, k), D, target);
          grad_y.wrote(target, (t * K + k) * D, D);
        }
        if (needs & kResidual) grad_residual.wrote(outer, t * D, D);
      }
    }
  });
  if (needs & (kNormWeight | kNormBias)) {
    const auto total = scratch<C>(2 * D);
    std::fill_n(total.get(), 2 * D, C(0));
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      op.kernels.add_scaled(sums.get() + chunk * 2 * D, 1, 2 * D, total.get());
    }
    if (needs & kNormWeight) Rows(std::get<3>(grads)).wrote(total.get(), 0, D);
    if (needs & kNormBias) Rows(std::get<4>(grads)).wrote(total.get() + D, 0, D);
  }
  return grads;
}

// What y and the residual promote to: the wider of the two, fp32 for fp16 with bf16.
int32_t promoted(const Tensor& y_TKD, const std::optional<Tensor>& residual_TD) {
  const int32_t y = dtype_code(y_TKD), residual = residual_TD ? dtype_code(*residual_TD) : y;
  const int32_t fp64 = aoti_torch_dtype_float64();
  if (y == residual) return y;
  return y == fp64 || residual == fp64 ? fp64 : aoti_torch_dtype_float32();
}

std::tuple<Tensor, Tensor, Tensor> combine(Tensor y_TKD, std::optional<Tensor> weights_TK,
                                           std::optional<Tensor> residual_TD, std::optional<Tensor> norm_weight_D,
                                           std::optional<Tensor> norm_bias_D, double eps) {
  const int32_t code = promoted(y_TKD, residual_TD);
  if (code == aoti_torch_dtype_float64()) {
    return combine_forward(Combine<double>(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D), code, eps);
  }
  return combine_forward(Combine<float>(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D), code, eps);
}

CombineGrads combine_grad(Tensor grad_TD, Tensor y_TKD, std::optional<Tensor> weights_TK,
                          std::optional<Tensor> residual_TD, std::optional<Tensor> norm_weight_D,
                          std::optional<Tensor> norm_bias_D, Tensor mean_T, Tensor rstd_T, int64_t needs) {
  const auto like = [&](const std::optional<Tensor>& tensor, int64_t need) {
    if (!(needs & need)) return new_tensor({0}, dtype_code(y_TKD));
    const auto sizes = tensor->sizes();
    return new_tensor(std::vector<int64_t>(sizes.begin(), sizes.end()), dtype_code(*tensor));
  };
  const CombineGrads grads{like(y_TKD, kY), like(weights_TK, kWeights), like(residual_TD, kResidual),
                           like(norm_weight_D, kNormWeight), like(norm_bias_D, kNormBias)};
  const auto run = [&](auto zero) {
    using C = decltype(zero);
    return combine_backward(Combine<C>(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D), grad_TD,
                            Dense<C>(mean_T), Dense<C>(rstd_T), grads, needs);
  };
  return is_double(grad_TD) ? run(0.0) : run(0.0f);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("combine_backward", TORCH_BOX(&combine_grad));
}

}  // namespace moe_zero
