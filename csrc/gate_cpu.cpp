// Operators moe_zero::gate and gate_backward on the CPU; schemas and definition are in moe_zero/ops/gate.py.
//
// T tokens, Q rows averaged per token, D hidden size, E experts, K experts per token. C is fp32, or fp64 where a tensor
// is fp64.
#include <cmath>

#include "top_k.h"
#include "torch_rows.h"

#ifdef MOE_ZERO_X86_KERNELS
#include <xmmintrin.h>
#endif

namespace moe_zero {
namespace {

constexpr int64_t kTokens = 16;  // of a chunk, the unit of work

// Router and tokens as the kernels need them.
template <typename C>
struct Gate {
  const MoeKernels<C>& kernels = moe_kernels<C>();
  Rows x;
  Dense<C> router;
  int64_t T, Q, D, E;

  Gate(const Tensor& x_TQD, const Tensor& router_ED)
      : x(x_TQD), router(router_ED), T(x_TQD.size(0)), Q(x_TQD.size(1)), D(x_TQD.size(2)), E(router_ED.size(0)) {}

  int64_t row(int64_t t, int64_t q) const { return t * x.stride(0) + q * x.stride(1); }

  // The average of a token's Q rows. `buffer` holds a row.
  void mean(int64_t t, C* out, C* buffer) const {
    x.read_into(row(t, 0), D, out);
    for (int64_t q = 1; q < Q; ++q) kernels.add_scaled(x.read(row(t, q), D, buffer), 1, D, out);
    if (Q > 1) kernels.scale(out, C(1) / static_cast<C>(Q), D, out);
  }
};

// Softmax of a row in place; returns the log of the sum of exponentials.
template <typename C>
C softmax(const MoeKernels<C>& kernels, C* row_E, int64_t E) {
  C largest = -INFINITY;
  bool nan = false;
  for (int64_t e = 0; e < E; ++e) {
    largest = std::max(largest, row_E[e]);
    nan = nan || row_E[e] != row_E[e];
  }
  const C sum = kernels.exp_shifted(row_E, largest, E);
  kernels.scale(row_E, 1 / sum, E, row_E);
  return nan ? sum : std::isinf(largest) ? largest : largest + std::log(sum);
}

using GateResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename C>
GateResult gate_forward(const Tensor& x_TQD, const Tensor& router_ED, int64_t K, bool renormalize) {
  const Gate<C> gate(x_TQD, router_ED);
  const int64_t T = gate.T, D = gate.D, E = gate.E;
  const Tensor weights_TK = new_tensor({T, K}, code_of<C>()), ids_TK = new_tensor({T, K}, aoti_torch_dtype_int64());
  const Tensor probs_TE = new_tensor({T, E}, code_of<C>()), counts_E = new_tensor({E}, aoti_torch_dtype_int64());
  const Tensor importance_E = new_tensor({E}, code_of<C>()), logsumexp_T = new_tensor({T}, code_of<C>());
  C* const weights = static_cast<C*>(weights_TK.data_ptr());
  int64_t* const ids = static_cast<int64_t*>(ids_TK.data_ptr());
  C* const probs = static_cast<C*>(probs_TE.data_ptr());
  C* const logsumexp = static_cast<C*>(logsumexp_T.data_ptr());

  const bool direct = gate.Q == 1 && gate.x.template direct<C>();
  parallel((T + kTokens - 1) / kTokens, kTokens * D * (gate.Q + E / 4), [&](int64_t begin, int64_t end) {
    const auto tokens = scratch<C>(direct ? 0 : kTokens * D), row_buffer = scratch<C>(direct ? 0 : D);
    TopK<C> top_k(E);
    for (int64_t t0 = begin * kTokens; t0 < std::min(T, end * kTokens); t0 += kTokens) {
      const int64_t n = std::min(kTokens, T - t0);
      const C* rows = tokens.get();
      if (direct) {
        rows = gate.x.template read<C>(gate.row(t0, 0), D, nullptr);
      } else {
        for (int64_t i = 0; i < n; ++i) gate.mean(t0 + i, tokens.get() + i * D, row_buffer.get());
      }
      gate.kernels.dot_rows(rows, direct ? gate.x.stride(0) : D, n, gate.router.get(), D, E, D, probs + t0 * E, E);
      for (int64_t t = t0; t < t0 + n; ++t) {
        C* row_E = probs + t * E;
        top_k(row_E, K, ids + t * K);
        logsumexp[t] = softmax(gate.kernels, row_E, E);
        C sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += weights[t * K + k] = row_E[ids[t * K + k]];
        if (renormalize) gate.kernels.scale(weights + t * K, 1 / sum, K, weights + t * K);
      }
    }
  });

  // Sums of 64 tokens first, then of those: errors grow with T / 64 at most, and threads have no say in the order.
  C* const importance = static_cast<C*>(importance_E.data_ptr());
  std::vector<C> part_E(E);
  std::fill_n(importance, E, C(0));
  for (int64_t t0 = 0; t0 < T; t0 += 64) {
    std::fill(part_E.begin(), part_E.end(), C(0));
    for (int64_t t = t0; t < std::min(T, t0 + 64); ++t) gate.kernels.add_scaled(probs + t * E, 1, E, part_E.data());
    gate.kernels.add_scaled(part_E.data(), 1, E, importance);
  }
  int64_t* const counts = static_cast<int64_t*>(counts_E.data_ptr());
  std::fill_n(counts, E, 0);
  for (int64_t i = 0; i < T * K; ++i) ++counts[ids[i]];
  return {weights_TK, ids_TK, probs_TE, counts_E, importance_E, logsumexp_T};
}

// Of a confident router most gradients are denormal numbers, on which processors are a hundred times slower; within its
// life they count as zero.
class FlushDenormals {
#ifdef MOE_ZERO_X86_KERNELS
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  FlushDenormals() {}
#endif
};

template <typename C>
std::tuple<Tensor, Tensor> gate_backward(const std::optional<Tensor>& grad_weights_TK,
                                         const std::optional<Tensor>& grad_probs_TE,
                                         const std::optional<Tensor>& grad_importance_E,
                                         const std::optional<Tensor>& grad_logsumexp_T, const Tensor& x_TQD,
                                         const Tensor& router_ED, const Tensor& ids_TK, const Tensor& probs_TE,
                                         bool renormalize, bool needs_x, bool needs_router) {
  const Gate<C> gate(x_TQD, router_ED);
  const int64_t T = gate.T, Q = gate.Q, D = gate.D, E = gate.E, K = ids_TK.size(1);
  const Dense<C> grad_weights(grad_weights_TK), grad_probs(grad_probs_TE), grad_importance(grad_importance_E),
      grad_logsumexp(grad_logsumexp_T), all_probs(probs_TE);
  const int64_t* ids = static_cast<const int64_t*>(ids_TK.const_data_ptr());
  const Tensor grad_x = new_or_empty(needs_x, {T, Q, D}, dtype_code(x_TQD));
  const Rows grad_x_TQD(grad_x);
  const auto grad_logits_TE = scratch<C>(T * E);
  // With several rows per token, their mean is kept from the pass over tokens for the one over columns.
  const auto means_TD = scratch<C>(needs_router && Q > 1 ? T * D : 0);

  parallel((T + kTokens - 1) / kTokens, kTokens * D * (Q + E / 4), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    const auto rows = scratch<C>(needs_x ? kTokens * D : 0), row_buffer = scratch<C>(D), shares = scratch<C>(kTokens * E);
    for (int64_t t0 = begin * kTokens; t0 < std::min(T, end * kTokens); t0 += kTokens) {
      const int64_t n = std::min(kTokens, T - t0);
      for (int64_t t = t0; t < t0 + n; ++t) {
        const C* probs = all_probs.get() + t * E;
        const int64_t* chosen = ids + t * K;
        C* grad = grad_logits_TE.get() + t * E;
        for (int64_t e = 0; e < E; ++e) {
          grad[e] = (grad_probs ? grad_probs[t * E + e] : 0) + (grad_importance ? grad_importance[e] : 0);
        }
        if (grad_weights) {
          C total = 1, mean = 0;
          if (renormalize) {
            total = 0;
            for (int64_t k = 0; k < K; ++k) total += probs[chosen[k]];
            for (int64_t k = 0; k < K; ++k) mean += grad_weights[t * K + k] * probs[chosen[k]];
            mean /= total;
          }
          for (int64_t k = 0; k < K; ++k) grad[chosen[k]] += (grad_weights[t * K + k] - mean) / total;
        }
        const C shift = gate.kernels.dot(probs, grad, E) - (grad_logsumexp ? grad_logsumexp[t] : 0);
        for (int64_t e = 0; e < E; ++e) grad[e] = probs[e] * (grad[e] - shift);
      }
      for (int64_t t = t0; t < t0 + n && needs_router && Q > 1; ++t) {
        gate.mean(t, means_TD.get() + t * D, row_buffer.get());
      }
      if (!needs_x) continue;
      // Dividing the E-wide operand by Q spares a pass over the D-wide result.
      gate.kernels.scale(grad_logits_TE.get() + t0 * E, C(1) / static_cast<C>(Q), n * E, shares.get());
      const bool direct = Q == 1 && grad_x_TQD.template direct<C>();
      C* out = direct ? grad_x_TQD.template target<C>(t0 * D, nullptr) : rows.get();
      gate.kernels.outer_rows(shares.get(), E, 1, n, E, gate.router.get(), D, D, out, D, false);
      if (direct) continue;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t q = 0; q < Q; ++q) grad_x_TQD.wrote(out + i * D, ((t0 + i) * Q + q) * D, D);
      }
    }
  });

  const Tensor grad_router = new_or_empty(needs_router, {E, D}, dtype_code(router_ED));
  if (needs_router) {
    const Rows grad_router_ED(grad_router);
    const bool direct = grad_router_ED.template direct<C>();
    const auto router_buffer = scratch<C>(direct ? 0 : E * D);
    C* const out = grad_router_ED.template target<C>(0, router_buffer.get());
    if (T == 0) std::fill_n(out, E * D, C(0));
    // Threads share the columns, so that each sum runs over the tokens in order.
    constexpr int64_t kColumns = 64, kBlock = 128;
    parallel((D + kColumns - 1) / kColumns, T * kColumns * (1 + E / 4), [&](int64_t begin, int64_t end) {
      const FlushDenormals flush;
      const auto buffer = scratch<C>(kBlock * kColumns);
      for (int64_t d = begin * kColumns; d < std::min(D, end * kColumns); d += kColumns) {
        const int64_t columns = std::min(kColumns, D - d);
        for (int64_t t0 = 0; t0 < T; t0 += kBlock) {
          const int64_t n = std::min(kBlock, T - t0);
          const C* tokens = means_TD.get() + t0 * D + d;
          if (Q == 1) {
            for (int64_t i = 0; i < n; ++i) {
              gate.x.read_into(gate.row(t0 + i, 0) + d, columns, buffer.get() + i * kColumns);
            }
            tokens = buffer.get();
          }
          gate.kernels.outer_rows(grad_logits_TE.get() + t0 * E, 1, E, E, n, tokens, Q == 1 ? kColumns : D, columns,
                                  out + d, D, t0 > 0);
        }
      }
    });
    if (!direct) grad_router_ED.wrote(out, 0, E * D);
  }
  return {grad_x, grad_router};
}

GateResult gate(Tensor x_TQD, Tensor router_ED, int64_t k, bool renormalize) {
  return is_double(x_TQD) || is_double(router_ED) ? gate_forward<double>(x_TQD, router_ED, k, renormalize)
                                                  : gate_forward<float>(x_TQD, router_ED, k, renormalize);
}

std::tuple<Tensor, Tensor> gate_grad(std::optional<Tensor> grad_weights_TK, std::optional<Tensor> grad_probs_TE,
                                     std::optional<Tensor> grad_importance_E, std::optional<Tensor> grad_logsumexp_T,
                                     Tensor x_TQD, Tensor router_ED, Tensor ids_TK, Tensor probs_TE, bool renormalize,
                                     bool needs_x, bool needs_router) {
  const auto run = is_double(probs_TE) ? gate_backward<double> : gate_backward<float>;
  return run(grad_weights_TK, grad_probs_TE, grad_importance_E, grad_logsumexp_T, x_TQD, router_ED, ids_TK, probs_TE,
             renormalize, needs_x, needs_router);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("gate", TORCH_BOX(&gate));
  m.impl("gate_backward", TORCH_BOX(&gate_grad));
}

}  // namespace moe_zero
