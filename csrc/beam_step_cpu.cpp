// Operator moe_zero::beam_step on the CPU; schema and definition are in moe_zero/ops/beam_step.py.
//
// B samples, J beams of a sample that enter, R experts, K beams that leave, L experts on a route.
#include <cmath>

#include "top_k.h"
#include "torch_rows.h"

namespace moe_zero {
namespace {

using Beams = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename C>
Beams beam_step_of(const std::optional<Tensor>& parent_scores_BJ, const Tensor& probs_PR, int64_t K,
                   const std::optional<Tensor>& routes_BJL) {
  const int64_t P = probs_PR.size(0), R = probs_PR.size(1);
  const int64_t J = parent_scores_BJ ? parent_scores_BJ->size(1) : 1, B = parent_scores_BJ ? parent_scores_BJ->size(0) : P;
  const int64_t L = routes_BJL ? routes_BJL->size(2) : 0, candidates = J * R, kept = std::min(K, candidates);
  if (candidates == 0) require("probs or parent_scores have no columns; every sample needs a beam and an expert");
  const Dense<C> probs(probs_PR), parent_scores(parent_scores_BJ);
  std::optional<Tensor> routes;
  if (routes_BJL) routes = torch::stable::contiguous(*routes_BJL);
  const int64_t* old_routes = routes ? static_cast<const int64_t*>(routes->const_data_ptr()) : nullptr;

  const Tensor scores_BK = new_tensor({B, K}, code_of<C>()), parents_BK = new_tensor({B, K}, aoti_torch_dtype_int64());
  const Tensor experts_BK = new_tensor({B, K}, aoti_torch_dtype_int64());
  const Tensor routes_BKL = new_tensor({B, K, L + 1}, aoti_torch_dtype_int64());
  C* const scores = static_cast<C*>(scores_BK.data_ptr());
  int64_t* const parents = static_cast<int64_t*>(parents_BK.data_ptr());
  int64_t* const experts = static_cast<int64_t*>(experts_BK.data_ptr());
  int64_t* const new_routes = static_cast<int64_t*>(routes_BKL.data_ptr());

  // A logarithm and an exponential take as long as reading 80 elements.
  parallel(B, candidates * (80 + 2 * std::min<int64_t>(K, 8)), [&](int64_t begin, int64_t end) {
    const auto scored = scratch<C>(candidates);
    const auto best = scratch<int64_t>(kept);
    TopK<C> top_k(candidates);
    for (int64_t b = begin; b < end; ++b) {
      const C* row = probs.get() + b * candidates;
      if (parent_scores) {
        for (int64_t j = 0; j < J; ++j) {
          const C parent = std::log(parent_scores[b * J + j]);
          for (int64_t r = 0; r < R; ++r) scored[j * R + r] = std::exp(std::log(row[j * R + r]) + parent);
        }
        row = scored.get();
      }
      top_k(row, kept, best.get());
      for (int64_t k = 0; k < K; ++k) {
        const int64_t chosen = k < kept ? best[k] : (k - kept) % candidates;
        const int64_t beam = chosen / R, expert = chosen % R, place = b * K + k;
        scores[place] = k < kept ? row[chosen] : 0;
        parents[place] = b * J + beam;
        experts[place] = expert;
        int64_t* route = new_routes + place * (L + 1);
        if (L) std::copy_n(old_routes + (b * J + beam) * L, L, route);
        route[L] = expert;
      }
    }
  });
  return {scores_BK, parents_BK, experts_BK, routes_BKL};
}

Beams beam_step(std::optional<Tensor> parent_scores_BJ, Tensor probs_PR, int64_t k, std::optional<Tensor> routes_BJL) {
  return is_double(probs_PR) ? beam_step_of<double>(parent_scores_BJ, probs_PR, k, routes_BJL)
                             : beam_step_of<float>(parent_scores_BJ, probs_PR, k, routes_BJL);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) { m.impl("beam_step", TORCH_BOX(&beam_step)); }

}  // namespace moe_zero
