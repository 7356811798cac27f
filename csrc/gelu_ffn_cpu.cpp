// Operators moe_zero::gelu_ffn and gelu_ffn_backward on the CPU; schemas and definition are in moe_zero/ops/gelu_ffn.py.
//
// Everything between two products is one pass over memory.
//
// T tokens, D hidden size, F FFN width, E experts, K experts per token, N = T * K pairs of a token and an expert (E * T
// in the dense form), n rows of one expert. C is fp32, or fp64 for fp64 tensors.
#include "expert_products.h"

namespace moe_zero {
namespace {

// Rows of a chunk, the unit of work between products.
constexpr int64_t kChunk = 16;

// Which places belong to which expert. Sparse: the pair t * K + k at each place, experts in order, tokens ascending
// within each. Dense: place e * T + t is expert e on row t.
struct Groups {
  Tensor order_N, offsets_E;
  const int32_t* order = nullptr;
  const int32_t* offsets = nullptr;
  int64_t T, K, E;
  bool is_dense;

  static Groups dense(int64_t T, int64_t E) {
    return Groups{new_tensor({0}, aoti_torch_dtype_int32()), new_tensor({0}, aoti_torch_dtype_int32()), nullptr, nullptr,
                  T, E, E, true};
  }

  static Groups sparse(const Tensor& order_N, const Tensor& offsets_E, int64_t T, int64_t K) {
    return Groups{order_N, offsets_E, static_cast<const int32_t*>(order_N.const_data_ptr()),
                  static_cast<const int32_t*>(offsets_E.const_data_ptr()), T, K, offsets_E.numel() - 1, false};
  }

  // A counting sort.
  static Groups sorted(const Tensor& ids_TK, int64_t E) {
    const std::vector<int64_t> expert_N = read_ids("ids", ids_TK, E, "for " + std::to_string(E) + " experts ");
    const int64_t N = static_cast<int64_t>(expert_N.size());
    const Tensor order_N = new_tensor({N}, aoti_torch_dtype_int32()), offsets_E = new_tensor({E + 1}, aoti_torch_dtype_int32());
    int32_t* const order = static_cast<int32_t*>(order_N.mutable_data_ptr());
    int32_t* const offsets = static_cast<int32_t*>(offsets_E.mutable_data_ptr());
    std::fill_n(offsets, E + 1, 0);
    for (const int64_t id : expert_N) ++offsets[id + 1];
    for (int64_t e = 0; e < E; ++e) offsets[e + 1] += offsets[e];
    std::vector<int32_t> next(offsets, offsets + E);
    for (int64_t i = 0; i < N; ++i) order[next[expert_N[i]]++] = static_cast<int32_t>(i);
    return sparse(order_N, offsets_E, ids_TK.size(0), ids_TK.size(1));
  }

  int64_t places() const { return T * K; }
  int64_t begin(int64_t e) const { return is_dense ? e * T : offsets[e]; }
  int64_t count(int64_t e) const { return begin(e + 1) - begin(e); }
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t e = 0; e < E; ++e) most = std::max(most, count(e));
    return most;
  }

  // Rows of x [T, D] that belong to expert e; `buffer` holds as many.
  Tensor gather(const Tensor& x_TD, int64_t e, const Tensor& buffer) const {
    if (is_dense) return x_TD;
    const int64_t n = count(e), item = dtype_size_of(x_TD), row = x_TD.size(1) * item;
    const Tensor rows = row_range(buffer, 0, n);
    const char* source = static_cast<const char*>(x_TD.const_data_ptr());
    char* const target = static_cast<char*>(rows.mutable_data_ptr());
    const int32_t* pairs = order + begin(e);
    parallel(n, x_TD.size(1), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        memcpy(target + i * row, source + pairs[i] / K * x_TD.stride(0) * item, row);
      }
    });
    return rows;
  }

  static int64_t dtype_size_of(const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

  // sum[token] += weight * (row + bias), for each of expert e's rows. Sums are in the order of the experts, whatever the
  // threads.
  template <typename C>
  void add_rows(const Tensor& rows_nD, const Dense<C>& bias, const Dense<C>& weights, int64_t e, const Tensor& sum_TD) const {
    const MoeKernels<C>& kernels = moe_kernels<C>();
    const Rows rows(rows_nD);
    C* const sum = static_cast<C*>(sum_TD.mutable_data_ptr());
    const int64_t n = rows_nD.size(0), D = rows_nD.size(1);
    const int32_t* pairs = order + begin(e);
    const auto token = [&](int64_t i) { return is_dense ? i : pairs[i] / K; };
    // A token that names the expert twice has both rows in one thread.
    const auto boundary = [&](int64_t i) {
      while (0 < i && i < n && token(i) == token(i - 1)) ++i;
      return i;
    };
    parallel(n, 3 * D, [&](int64_t first, int64_t last) {
      const auto buffer = scratch<C>(D);
      for (int64_t i = boundary(first), end = boundary(last); i < end; ++i) {
        const C weight = weights ? weights[pairs[i]] : 1;
        C* const target = sum + token(i) * D;
        kernels.add_scaled(rows.template read<C>(i * D, D, buffer.get()), weight, D, target);
        if (bias) kernels.add_scaled(bias.get(), weight, D, target);
      }
    });
  }
};

// The sums in the dtype of the result.
inline Tensor rounded(const Tensor& sum_TD, int32_t code) {
  if (dtype_code(sum_TD) == code) return sum_TD;
  Tensor out = new_tensor({sum_TD.size(0), sum_TD.size(1)}, code);
  return torch::stable::copy_(out, sum_TD);
}

template <typename C>
void gelu_rows(const Affine<C>& product, bool tanh, const Tensor& pre_nF, const Tensor& act_nF) {
  const Rows rows(product.rows), pre(pre_nF), act(act_nF);
  const int64_t n = pre_nF.size(0), F = pre_nF.size(1);
  parallel(n, 4 * F, [&](int64_t begin, int64_t end) {
    const auto in = scratch<C>(F), out = scratch<C>(F);
    for (int64_t i = begin; i < end; ++i) {
      C* const target = act.template target<C>(i * F, out.get());
      moe_kernels<C>().gelu(rows.template read<C>(i * F, F, in.get()), product.bias.get(), F, tanh,
                            pre.template target<C>(i * F, in.get()), target);
      act.wrote(target, i * F, F);
    }
  });
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename C>
Forward forward(const Tensor& x_TD, const std::optional<Tensor>& ids_TK, const std::optional<Tensor>& weights_TK,
                const Tensors& w1, const Tensors& b1, const Tensors& w2, const Tensors& b2, bool tanh, bool save) {
  const int64_t T = x_TD.size(0), D = x_TD.size(1), E = num_experts(w1), F = w1[0].size(w1[0].dim() - 2);
  const int32_t code = dtype_code(x_TD);
  const Groups groups = ids_TK ? Groups::sorted(*ids_TK, E) : Groups::dense(T, E);
  const int64_t N = groups.places(), longest = groups.longest();
  const bool dense = groups.is_dense;
  const Tensor pre_NF = new_tensor({save ? N : 0, F}, code);
  const Tensor y_TD = dense ? new_tensor({E, T, D}, code) : new_tensor({T, D}, code_of<C>());
  if (!dense) fill_zero(y_TD, 0, T * D);
  const Dense<C> weights(weights_TK);
  // One buffer for all experts: fresh memory costs page faults, and what is in the caches costs none.
  const Tensor act_buffer = new_tensor({longest, F}, code);
  const Tensor x_buffer = new_tensor({dense ? 0 : longest, D}, code), y_buffer = new_tensor({dense ? 0 : longest, D}, code);
  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = groups.begin(e), n = groups.count(e);
    if (n == 0) continue;
    const Tensor act_nF = row_range(act_buffer, 0, n);
    const Tensor pre_nF = save ? row_range(pre_NF, begin, n) : act_nF;
    gelu_rows<C>(affine_without_bias<C>(groups.gather(x_TD, e, x_buffer), expert(w1, e), bias_of(b1, e), pre_nF), tanh,
                 pre_nF, act_nF);
    if (dense) {
      affine(act_nF, expert(w2, e), bias_of(b2, e), view_at(y_TD, e * T * D, {T, D}, {D, 1}));
    } else {
      const Tensor y_nD = row_range(y_buffer, 0, n);
      const auto [rows_nD, bias] = affine_without_bias<C>(act_nF, expert(w2, e), bias_of(b2, e), y_nD);
      groups.add_rows<C>(rows_nD, bias, weights, e, y_TD);
    }
  }
  return {dense ? y_TD : rounded(y_TD, code), pre_NF, groups.order_N, groups.offsets_E};
}

enum Need { kX = 1, kWeights = 2, kW1 = 4, kB1 = 8, kW2 = 16, kB2 = 32 };
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <typename C>
Backward backward(const Tensor& grad_y, const Tensor& x_TD, const std::optional<Tensor>& weights_TK, const Tensors& w1,
                  const Tensors& b1, const Tensors& w2, const Tensors& b2, const Tensor& pre_NF, const Groups& groups,
                  bool tanh, bool saved, int64_t needs) {
  const int64_t T = x_TD.size(0), D = x_TD.size(1), E = groups.E, F = w1[0].size(w1[0].dim() - 2), K = groups.K;
  const int64_t N = groups.places(), longest = groups.longest();
  const int32_t code = dtype_code(x_TD);
  const bool dense = groups.is_dense;
  const MoeKernels<C>& kernels = moe_kernels<C>();
  const auto grad = [&](Need need, const std::vector<int64_t>& sizes) {
    return new_or_empty(needs & need, sizes, code);
  };
  const Tensor grad_w1 = grad(kW1, {E, F, D}), grad_b1 = grad(kB1, {E, F}), grad_w2 = grad(kW2, {E, D, F});
  const Tensor grad_b2 = grad(kB2, {E, D});
  const bool direct = groups.is_dense && E == 1;  // the only product is the gradient of x
  const Tensor grad_x = new_or_empty(needs & kX, {T, D}, direct ? code : code_of<C>());
  if (needs & kX && !direct) fill_zero(grad_x, 0, T * D);
  const Tensor grad_weights = needs & kWeights ? new_tensor({T, K}, dtype_code(*weights_TK)) : new_tensor({0}, code);
  const auto grad_weights_N = scratch<C>(needs & kWeights ? N : 0);
  const Tensor grad_y_all = torch::stable::contiguous(grad_y);
  const Tensor act_buffer = new_tensor({longest, F}, code), grad_buffer = new_tensor({longest, F}, code);
  const Tensor pre_buffer = new_tensor({saved ? 0 : longest, F}, code);
  const Tensor x_buffer = new_tensor({dense ? 0 : longest, D}, code), y_buffer = new_tensor({dense ? 0 : longest, D}, code);
  const Tensor grad_x_buffer = new_tensor({needs & kX && !direct ? longest : 0, D}, code);
  const Dense<C> weights(weights_TK), nothing(std::nullopt);

  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = groups.begin(e), n = groups.count(e);
    if (n == 0) {
      for (const auto& [need, all] : {std::pair(kW1, grad_w1), {kB1, grad_b1}, {kW2, grad_w2}, {kB2, grad_b2}}) {
        if (needs & need) fill_zero(all, e * all.stride(0), all.stride(0));
      }
      continue;
    }
    const auto weight = [&](int64_t i) { return weights ? weights[groups.order[begin + i]] : C(1); };
    const Tensor x_nD = groups.gather(x_TD, e, x_buffer);
    const Tensor grad_y_nD = dense ? view_at(grad_y_all, e * T * D, {T, D}, {D, 1}) : groups.gather(grad_y_all, e, y_buffer);
    const Tensor pre_nF = row_range(saved ? pre_NF : pre_buffer, saved ? begin : 0, n);
    if (!saved) affine(x_nD, expert(w1, e), bias_of(b1, e), pre_nF);
    const Tensor act_nF = row_range(act_buffer, 0, n), grad_nF = row_range(grad_buffer, 0, n);
    mm(grad_y_nD, expert(w2, e), grad_nF);

    // One pass from the gradient of the activations to that of the pre-activations. It also makes the activations again,
    // both with the token's weight as a factor; the gradients of that weight, without keeping y; and the biases'.
    const Rows pre(pre_nF), act(act_nF), inner(grad_nF), outer(grad_y_nD);
    const Dense<C> bias2(needs & kWeights && !b2.empty() ? std::optional(expert(b2, e)) : std::nullopt);
    const int64_t rows = std::max(kChunk, (n + 15) / 16), chunks = (n + rows - 1) / rows;
    const auto sums1 = scratch<C>(needs & kB1 ? chunks * F : 0), sums2 = scratch<C>(needs & kB2 ? chunks * D : 0);
    parallel(chunks, rows * 8 * F, [&](int64_t first, int64_t last) {
      const auto pre_row = scratch<C>(F), grad_row = scratch<C>(F), act_row = scratch<C>(F), y_row = scratch<C>(D);
      for (int64_t chunk = first; chunk < last; ++chunk) {
        C* const sum1 = needs & kB1 ? sums1.get() + chunk * F : nullptr;
        C* const sum2 = needs & kB2 ? sums2.get() + chunk * D : nullptr;
        if (sum1) std::fill_n(sum1, F, C(0));
        if (sum2) std::fill_n(sum2, D, C(0));
        for (int64_t i = chunk * rows; i < std::min(n, (chunk + 1) * rows); ++i) {
          C* const act_out = needs & kW2 ? act.template target<C>(i * F, act_row.get()) : nullptr;
          C* const grad_out = inner.template target<C>(i * F, grad_row.get());
          const C* const grad_in = inner.template read<C>(i * F, F, grad_row.get());
          C product = kernels.gelu_backward(grad_in, pre.template read<C>(i * F, F, pre_row.get()), weight(i), F, tanh,
                                            act_out, grad_out, sum1);
          if (act_out) act.wrote(act_out, i * F, F);
          inner.wrote(grad_out, i * F, F);
          if (!bias2 && !sum2) {
            if (needs & kWeights) grad_weights_N[groups.order[begin + i]] = product;
            continue;
          }
          const C* const y = outer.template read<C>(i * D, D, y_row.get());
          if (sum2) kernels.add_scaled(y, weight(i), D, sum2);
          if (bias2) product += kernels.dot(y, bias2.get(), D);
          if (needs & kWeights) grad_weights_N[groups.order[begin + i]] = product;
        }
      }
    });
    if (needs & kB1) reduce_rows(sums1.get(), chunks, F, grad_b1, e);
    if (needs & kB2) reduce_rows(sums2.get(), chunks, D, grad_b2, e);
    if (needs & kW2) mm(transposed(grad_y_nD), act_nF, view_at(grad_w2, e * D * F, {D, F}, {F, 1}));
    if (needs & kW1) mm(transposed(grad_nF), x_nD, view_at(grad_w1, e * F * D, {F, D}, {D, 1}));
    if (needs & kX) {
      const Tensor grad_x_nD = direct ? grad_x : row_range(grad_x_buffer, 0, n);
      mm(grad_nF, expert(w1, e), grad_x_nD);
      if (!direct) groups.add_rows<C>(grad_x_nD, nothing, nothing, e, grad_x);
    }
  }

  if (needs & kWeights) Rows(grad_weights).wrote(grad_weights_N.get(), 0, N);
  return {needs & kX ? rounded(grad_x, code) : new_tensor({0}, code), grad_weights, grad_w1, grad_b1, grad_w2, grad_b2};
}

Forward gelu_ffn(Tensor x_TD, std::optional<Tensor> ids_TK, std::optional<Tensor> weights_TK, Tensors w1, Tensors b1,
                 Tensors w2, Tensors b2, bool tanh, bool save) {
  x_TD = torch::stable::contiguous(x_TD);
  const auto run = is_double(x_TD) ? forward<double> : forward<float>;
  return run(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, tanh, save);
}

Backward gelu_ffn_backward(Tensor grad_y, Tensor x_TD, std::optional<Tensor> weights_TK, Tensors w1, Tensors b1,
                           Tensors w2, Tensors b2, Tensor pre_NF, Tensor order_N, Tensor offsets_E, bool dense,
                           int64_t experts_per_token, bool tanh, bool saved, int64_t needs) {
  x_TD = torch::stable::contiguous(x_TD);
  const Groups groups = dense ? Groups::dense(x_TD.size(0), num_experts(w1))
                              : Groups::sparse(order_N, offsets_E, x_TD.size(0), experts_per_token);
  const auto run = is_double(x_TD) ? backward<double> : backward<float>;
  return run(grad_y, x_TD, weights_TK, w1, b1, w2, b2, pre_NF, groups, tanh, saved, needs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_zero, CPU, m) {
  m.impl("gelu_ffn", TORCH_BOX(&gelu_ffn));
  m.impl("gelu_ffn_backward", TORCH_BOX(&gelu_ffn_backward));
}

}  // namespace moe_zero
