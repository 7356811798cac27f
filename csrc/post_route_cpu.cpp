// Operators moe_zero::post_route_up, post_route_down and their gradients on the CPU; schemas and definition are in
// moe_zero/ops/post_route.py.
//
// G groups of Q rows, R = G * Q, D hidden size, F FFN width, E experts, S chosen pairs of a group and an expert, n of one
// expert. C is fp32, or fp64 for fp64 tensors.
#include "expert_products.h"

namespace moe_zero {
namespace {

template <typename C>
std::tuple<Tensor, Tensor> up_forward(const Tensor& x_RD, int64_t Q, const Tensors& w1, const Tensors& b1,
                                      const Tensor& folded_EF, bool tanh) {
  const int64_t R = x_RD.size(0), E = folded_EF.size(0), F = folded_EF.size(1), G = R / Q;
  const MoeKernels<C>& kernels = moe_kernels<C>();
  const Tensor pre_ERF = new_tensor({E, R, F}, dtype_code(x_RD)), logits_GE = new_tensor({G, E}, code_of<C>());
  C* const logits = static_cast<C*>(logits_GE.mutable_data_ptr());
  const Dense<C> folded(folded_EF);
  for (int64_t e = 0; e < E; ++e) {
    const Tensor pre_RF = view_at(pre_ERF, e * R * F, {R, F}, {F, 1});
    const auto [rows_RF, bias] = affine_without_bias<C>(x_RD, expert(w1, e), bias_of(b1, e), pre_RF);
    const Rows product(rows_RF), pre(pre_RF);
    parallel(G, 4 * Q * F, [&](int64_t begin, int64_t end) {
      const auto buffer = scratch<C>(F), act = scratch<C>(F);
      for (int64_t g = begin; g < end; ++g) {
        C sum = 0;
        for (int64_t r = g * Q; r < (g + 1) * Q; ++r) {
          kernels.gelu(product.template read<C>(r * F, F, buffer.get()), bias.get(), F, tanh,
                       pre.template target<C>(r * F, buffer.get()), act.get());
          sum += kernels.dot(act.get(), folded.get() + e * F, F);
        }
        logits[g * E + e] = sum / static_cast<C>(Q);
      }
    });
  }
  return {logits_GE, pre_ERF};
}

enum NeedUp { kX = 1, kW1 = 2, kB1 = 4, kFolded = 8 };
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename C>
Grads up_backward(const std::optional<Tensor>& grad_logits_GE, const std::optional<Tensor>& grad_pre_ERF,
                  const Tensor& x_RD, int64_t Q, const Tensors& w1, const Tensor& folded_EF, const Tensor& pre_ERF,
                  bool tanh, int64_t needs) {
  const int64_t R = x_RD.size(0), D = x_RD.size(1), E = folded_EF.size(0), F = folded_EF.size(1), G = R / Q;
  const int32_t code = dtype_code(x_RD);
  const MoeKernels<C>& kernels = moe_kernels<C>();
  const Grads grads{new_or_empty(needs & kX, {R, D}, code), new_or_empty(needs & kW1, {E, F, D}, code),
                    new_or_empty(needs & kB1, {E, F}, code), new_or_empty(needs & kFolded, {E, F}, code_of<C>())};
  const auto& [grad_x, grad_w1, grad_b1, grad_folded] = grads;
  if (needs & kX && (R == 0 || E == 0)) fill_zero(grad_x, 0, R * D);
  const Dense<C> folded(folded_EF), grad_logits(grad_logits_GE);
  const std::optional<Rows> more = grad_pre_ERF ? std::optional<Rows>(torch::stable::contiguous(*grad_pre_ERF)) : std::nullopt;
  const Tensor inner_RF = new_tensor({R, F}, code);
  const Rows inner(inner_RF), pre(pre_ERF);
  const auto sums1 = scratch<C>(G * F), sums_folded = scratch<C>(G * F);  // by group, added in order
  for (int64_t e = 0; e < E; ++e) {
    parallel(G, 8 * Q * F, [&](int64_t begin, int64_t end) {
      const auto buffer = scratch<C>(F), act = scratch<C>(F), row = scratch<C>(F);
      for (int64_t g = begin; g < end; ++g) {
        C* const sum1 = sums1.get() + g * F;
        C* const sum_folded = sums_folded.get() + g * F;
        std::fill_n(sum1, F, C(0));
        std::fill_n(sum_folded, F, C(0));
        const C share = grad_logits ? grad_logits[g * E + e] / static_cast<C>(Q) : 0;
        for (int64_t r = g * Q; r < (g + 1) * Q; ++r) {
          C* const out = inner.template target<C>(r * F, row.get());
          if (grad_logits) {
            kernels.gelu_backward(folded.get() + e * F, pre.template read<C>((e * R + r) * F, F, buffer.get()), share, F,
                                  tanh, act.get(), out, nullptr);
            if (needs & kFolded) kernels.add_scaled(act.get(), 1, F, sum_folded);
            if (more) kernels.add_scaled(more->template read<C>((e * R + r) * F, F, buffer.get()), 1, F, out);
          } else {
            more->read_into((e * R + r) * F, F, out);
          }
          if (needs & kB1) kernels.add_scaled(out, 1, F, sum1);
          inner.wrote(out, r * F, F);
        }
      }
    });
    if (G == 0) {
      if (needs & kW1) fill_zero(grad_w1, e * F * D, F * D);
      if (needs & kB1) fill_zero(grad_b1, e * F, F);
      if (needs & kFolded) fill_zero(grad_folded, e * F, F);
      continue;
    }
    if (needs & kB1) reduce_rows(sums1.get(), G, F, grad_b1, e);
    if (needs & kFolded) reduce_rows(sums_folded.get(), G, F, grad_folded, e);
    if (needs & kW1) mm(transposed(inner_RF), x_RD, view_at(grad_w1, e * F * D, {F, D}, {D, 1}));
    if (!(needs & kX)) continue;
    mm(inner_RF, expert(w1, e), grad_x, e > 0 ? std::optional(grad_x) : std::nullopt);
  }
  return grads;
}

// The chosen pairs, by expert.
struct Chosen {
  std::vector<int64_t> groups;
  std::vector<std::vector<int64_t>> places;  // in S, of each expert

  Chosen(const Tensor& groups_S, const Tensor& experts_S, int64_t G, int64_t E)
      : groups(read_ids("groups", groups_S, G, "")), places(E) {
    const std::vector<int64_t> experts = read_ids("experts", experts_S, E, "");
    for (size_t s = 0; s < experts.size(); ++s) places[experts[s]].push_back(static_cast<int64_t>(s));
  }

  int64_t longest() const {
    size_t most = 0;
    for (const auto& of_expert : places) most = std::max(most, of_expert.size());
    return static_cast<int64_t>(most);
  }
};

template <typename C>
Tensor down_forward(const Tensor& pre_EGQF, const Tensor& groups_S, const Tensor& experts_S,
                    const std::optional<Tensor>& weights_S, const Tensors& w2, const Tensors& b2, bool tanh) {
  const int64_t E = pre_EGQF.size(0), G = pre_EGQF.size(1), Q = pre_EGQF.size(2), F = pre_EGQF.size(3);
  const int64_t S = groups_S.numel(), D = w2[0].size(w2[0].dim() - 2);
  const int32_t code = dtype_code(pre_EGQF);
  const Chosen chosen(groups_S, experts_S, G, E);
  const Dense<C> weights(weights_S);
  const Rows pre(pre_EGQF);
  const Tensor y_SQD = new_tensor({S, Q, D}, code);
  const Rows y(y_SQD);
  const Tensor act_buffer = new_tensor({chosen.longest() * Q, F}, code), y_buffer = new_tensor({chosen.longest() * Q, D}, code);
  for (int64_t e = 0; e < E; ++e) {
    const std::vector<int64_t>& places = chosen.places[e];
    const int64_t rows = static_cast<int64_t>(places.size()) * Q;
    if (rows == 0) continue;
    const Tensor act_nF = row_range(act_buffer, 0, rows), y_nD = row_range(y_buffer, 0, rows);
    const Rows act(act_nF);
    parallel(rows, 4 * F, [&](int64_t begin, int64_t end) {
      const auto in = scratch<C>(F), out = scratch<C>(F);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t source = ((e * G + chosen.groups[places[i / Q]]) * Q + i % Q) * F;
        C* const target = act.template target<C>(i * F, out.get());
        moe_kernels<C>().gelu(pre.template read<C>(source, F, in.get()), nullptr, F, tanh, nullptr, target);
        act.wrote(target, i * F, F);
      }
    });
    const auto [rows_nD, bias] = affine_without_bias<C>(act_nF, expert(w2, e), bias_of(b2, e), y_nD);
    const Rows product(rows_nD);
    parallel(rows, 2 * D, [&](int64_t begin, int64_t end) {
      const auto in = scratch<C>(D), out = scratch<C>(D);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t s = places[i / Q], place = (s * Q + i % Q) * D;
        C* const target = y.template target<C>(place, out.get());
        const C weight = weights ? weights[s] : 1;
        moe_kernels<C>().scale(product.template read<C>(i * D, D, in.get()), weight, D, target);
        if (bias) moe_kernels<C>().add_scaled(bias.get(), weight, D, target);
        y.wrote(target, place, D);
      }
    });
  }
  return y_SQD;
}

enum NeedDown { kPre = 1, kWeights = 2, kW2 = 4, kB2 = 8 };

template <typename C>
Grads down_backward(const Tensor& grad_y, const Tensor& pre_EGQF, const Tensor& groups_S, const Tensor& experts_S,
                    const std::optional<Tensor>& weights_S, const Tensors& w2, const Tensors& b2, bool tanh,
                    int64_t needs) {
  const int64_t E = pre_EGQF.size(0), G = pre_EGQF.size(1), Q = pre_EGQF.size(2), F = pre_EGQF.size(3);
  const int64_t S = groups_S.numel(), D = w2[0].size(w2[0].dim() - 2);
  const int32_t code = dtype_code(pre_EGQF);
  const MoeKernels<C>& kernels = moe_kernels<C>();
  const Chosen chosen(groups_S, experts_S, G, E);
  const Dense<C> weights(weights_S);
  const Grads grads{new_or_empty(needs & kPre, {E, G, Q, F}, code),
                    new_or_empty(needs & kWeights, {S}, weights_S ? dtype_code(*weights_S) : code),
                    new_or_empty(needs & kW2, {E, D, F}, code), new_or_empty(needs & kB2, {E, D}, code)};
  const auto& [grad_pre, grad_weights, grad_w2, grad_b2] = grads;
  if (needs & kPre) fill_zero(grad_pre, 0, E * G * Q * F);
  const Rows pre(pre_EGQF), pre_out(grad_pre);
  const Rows grad_rows(torch::stable::contiguous(grad_y));
  const int64_t longest = chosen.longest() * Q;
  const Tensor y_buffer = new_tensor({longest, D}, code), inner_buffer = new_tensor({longest, F}, code);
  const Tensor act_buffer = new_tensor({needs & kW2 ? longest : 0, F}, code);
  const auto products = scratch<C>(longest), grad_weights_S = scratch<C>(S), sums = scratch<C>(Q * D);
  for (int64_t e = 0; e < E; ++e) {
    const std::vector<int64_t>& places = chosen.places[e];
    const int64_t n = static_cast<int64_t>(places.size());
    if (n == 0) {
      if (needs & kW2) fill_zero(grad_w2, e * D * F, D * F);
      if (needs & kB2) fill_zero(grad_b2, e * D, D);
      continue;
    }
    // Row i * Q + q is row q of the expert's i-th pair.
    const Tensor y_nD = row_range(y_buffer, 0, n * Q), inner_nF = row_range(inner_buffer, 0, n * Q);
    const Rows outer(y_nD), inner(inner_nF), act(act_buffer);
    parallel(n, Q * D, [&](int64_t begin, int64_t end) {
      const auto buffer = scratch<C>(D);
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t q = 0; q < Q; ++q) {
          outer.wrote(grad_rows.template read<C>((places[i] * Q + q) * D, D, buffer.get()), (i * Q + q) * D, D);
        }
      }
    });
    mm(y_nD, expert(w2, e), inner_nF);
    const Dense<C> bias(needs & kWeights ? bias_of(b2, e) : std::nullopt);
    // Threads share the rows q: a pair that is chosen twice then adds to the same row in one thread, in order.
    parallel(Q, 8 * n * F, [&](int64_t begin, int64_t end) {
      const auto pre_row = scratch<C>(F), grad_row = scratch<C>(F), act_row = scratch<C>(F), y_row = scratch<C>(D);
      for (int64_t q = begin; q < end; ++q) {
        C* const sum = sums.get() + q * D;
        std::fill_n(sum, D, C(0));
        for (int64_t i = 0; i < n; ++i) {
          const int64_t row = i * Q + q, place = ((e * G + chosen.groups[places[i]]) * Q + q) * F;
          const C weight = weights ? weights[places[i]] : 1;
          C* const act_out = needs & kW2 ? act.template target<C>(row * F, act_row.get()) : nullptr;
          const C* const grad_in = inner.template read<C>(row * F, F, grad_row.get());
          C product = kernels.gelu_backward(grad_in, pre.template read<C>(place, F, pre_row.get()), weight, F, tanh,
                                            act_out, grad_row.get(), nullptr);
          if (act_out) act.wrote(act_out, row * F, F);
          if (needs & kPre) {
            C* const target = pre_out.template target<C>(place, pre_row.get());
            if (!pre_out.template direct<C>()) pre_out.read_into(place, F, target);
            kernels.add_scaled(grad_row.get(), 1, F, target);
            pre_out.wrote(target, place, F);
          }
          if (bias || needs & kB2) {
            const C* const y = outer.template read<C>(row * D, D, y_row.get());
            if (needs & kB2) kernels.add_scaled(y, weight, D, sum);
            if (bias) product += kernels.dot(y, bias.get(), D);
          }
          products[row] = product;
        }
      }
    });
    for (int64_t i = 0; i < n; ++i) {
      C sum = 0;
      for (int64_t q = 0; q < Q; ++q) sum += products[i * Q + q];
      grad_weights_S[places[i]] = sum;
    }
    if (needs & kB2) reduce_rows(sums.get(), Q, D, grad_b2, e);
    if (needs & kW2) mm(transposed(y_nD), row_range(act_buffer, 0, n * Q), view_at(grad_w2, e * D * F, {D, F}, {F, 1}));
  }
  if (needs & kWeights) Rows(grad_weights).wrote(grad_weights_S.get(), 0, S);
  return grads;
}

std::tuple<Tensor, Tensor> post_route_up(Tensor x_RD, int64_t Q, Tensors w1, Tensors b1, Tensor folded_EF, bool tanh) {
  x_RD = torch::stable::contiguous(x_RD);
  return is_double(x_RD) || is_double(folded_EF) ? up_forward<double>(x_RD, Q, w1, b1, folded_EF, tanh)
                                                 : up_forward<float>(x_RD, Q, w1, b1, folded_EF, tanh);
}

Grads post_route_up_backward(std::optional<Tensor> grad_logits_GE, std::optional<Tensor> grad_pre_ERF, Tensor x_RD,
                             int64_t Q, Tensors w1, Tensor folded_EF, Tensor pre_ERF, bool tanh, int64_t needs) {
  x_RD = torch::stable::contiguous(x_RD);
  const auto run = is_double(x_RD) || is_double(folded_EF) ? up_backward<double> : up_backward<float>;
  return run(grad_logits_GE, grad_pre_ERF, x_RD, Q, w1, folded_EF, pre_ERF, tanh, needs);
}

Tensor post_route_down(Tensor pre_EGQF, Tensor groups_S, Tensor experts_S, std::optional<Tensor> weights_S, Tensors w2,
                       Tensors b2, bool tanh) {
  const auto run = is_double(pre_EGQF) ? down_forward<double> : down_forward<float>;
  return run(torch::stable::contiguous(pre_EGQF), groups_S, experts_S, weights_S, w2, b2, tanh);
}

Grads post_route_down_backward(Tensor grad_SQD, Tensor pre_EGQF, Tensor groups_S, Tensor experts_S,
                               std::optional<Tensor> weights_S, Tensors w2, Tensors b2, bool tanh, int64_t needs) {
  const auto run = is_double(pre_EGQF) ? down_backward<double> : down_backward<float>;
  return run(grad_SQD, torch::stable::contiguous(pre_EGQF), groups_S, experts_S, weights_S, w2, b2, tanh, needs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("post_route_up", TORCH_BOX(&post_route_up));
  m.impl("post_route_up_backward", TORCH_BOX(&post_route_up_backward));
  m.impl("post_route_down", TORCH_BOX(&post_route_down));
  m.impl("post_route_down_backward", TORCH_BOX(&post_route_down_backward));
}

}  // namespace moe_zero
