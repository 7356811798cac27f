"""Post-route experts: the gate scores what the experts produce, yet only the chosen ones produce it.

The logit of an expert is the gate vector times the mean of its output over the Q rows of a group. That is linear in the
output, so with h = gelu(w1 x + b1) it equals ``mean(h) . (w2^T gate) + gate . b2``: the second product is not needed
before the choice, and afterwards only for the chosen pairs of a group and an expert.

Legend of shape suffixes: G groups of rows, Q rows per group, R = G * Q rows, D hidden size, F FFN width, E experts,
S chosen pairs of a group and an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_zero.ops._library import (
    Operator,
    accumulate_dtype,
    check_float,
    check_same_device,
    from_bits,
    promote,
    to_bits,
    triton_kernels,
)
from moe_zero.ops.gelu_ffn import (
    Weights,
    affine,
    approximation,
    check_experts,
    check_parameters,
    expert,
    gelu_backward_,
    unstack,
)


class PostRoute(NamedTuple):
    """Logits of all experts, and what their outputs can be had from."""

    logits: Tensor
    """[G, E], fp32 (fp64 for fp64 inputs)."""
    hidden: Tensor
    """[E, G, Q, F]: pre-activations of every expert, for :func:`post_route_outputs`."""


def post_route_logits(
    x_GQD: Tensor,
    gate_D: Tensor,
    w1_EFD: Weights,
    b1_EF: Weights | None,
    w2_EDF: Weights,
    b2_ED: Weights | None,
    *,
    approximate: str = "none",
) -> PostRoute:
    """``gate . mean over Q of FFN_e(x)`` for every group and expert, at the cost of the first product alone.

    Args:
        x_GQD: [G, Q, D].
        gate_D: [D] or [1, D], the gate's weight.
        w1_EFD, b1_EF, w2_EDF, b2_ED, approximate: as in :func:`moe_zero.ops.gelu_ffn.gelu_ffn`.

    Differentiable in all tensors, once. Raises as ``gelu_ffn`` does.
    """
    check_float(x=x_GQD, gate=gate_D)
    check_same_device(x=x_GQD, gate=gate_D)
    if x_GQD.dim() != 3 or x_GQD.shape[1] == 0:
        raise ValueError(f"x has shape {tuple(x_GQD.shape)}; it must be [G, Q, D] with Q at least 1")
    G, Q, D = x_GQD.shape
    if gate_D.numel() != D or gate_D.dim() not in (1, 2):
        raise ValueError(f"gate has shape {tuple(gate_D.shape)}; for hidden size {D} it must be [{D}] or [1, {D}]")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    w1, b1, w2, b2 = check_experts(D, w1_EFD, b1_EF, w2_EDF, b2_ED)
    check_same_device(x=x_GQD, w1=w1[0])
    gate_D = gate_D.reshape(D)
    with torch.autocast(x_GQD.device.type, enabled=False):
        folded_EF = _fold(gate_D, w2)
        shift = _fold(gate_D, [b.unsqueeze(-1) for b in b2]).squeeze(-1) if b2 else None
    (x_RD,), w1, b1 = promote([x_GQD.reshape(-1, D)], w1, b1)
    logits_GE, pre_ERF = _post_route_up(x_RD, Q, w1, b1, folded_EF, approximate == "tanh")
    logits_GE = logits_GE if shift is None else logits_GE + shift
    return PostRoute(logits_GE, pre_ERF.unflatten(1, (G, Q)))


def post_route_outputs(
    hidden_EGQF: Tensor,
    groups_S: Tensor,
    experts_S: Tensor,
    weights_S: Tensor | None,
    w2_EDF: Weights,
    b2_ED: Weights | None,
    *,
    approximate: str = "none",
) -> Tensor:
    """Outputs of the chosen pairs, ``weight * (w2 gelu(hidden[expert, group]) + b2)``: [S, Q, D].

    Args:
        hidden_EGQF: from :func:`post_route_logits`, of the same ``approximate``.
        groups_S, experts_S: [S] integers, in [0, G) and [0, E).
        weights_S: [S] floats, or ``None`` for ones.
        w2_EDF, b2_ED: as in :func:`post_route_logits`.

    Differentiable in hidden, weights and parameters, once. On CUDA, gradients are the same bit for bit from run to run
    as long as no pair is chosen twice. Raises ``ValueError`` for shapes that don't fit and, on the CPU, for indices out
    of range.
    """
    check_float(hidden=hidden_EGQF, weights=weights_S)
    check_same_device(hidden=hidden_EGQF, groups=groups_S, experts=experts_S, weights=weights_S)
    if hidden_EGQF.dim() != 4:
        raise ValueError(f"hidden has shape {tuple(hidden_EGQF.shape)}; it must be [E, G, Q, F]")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    for name, tensor in (("groups", groups_S), ("experts", experts_S), ("weights", weights_S)):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape != groups_S.shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; groups, experts and weights must be [S] alike")
    E, _, _, F = hidden_EGQF.shape
    D = w2_EDF[0].shape[0] if len(w2_EDF) and w2_EDF[0].dim() == 2 else 0
    w2, b2 = check_parameters(E, {"w2": (D, F), "b2": (D,)}, {"w2": w2_EDF, "b2": b2_ED})
    check_same_device(hidden=hidden_EGQF, w2=w2[0])
    (hidden_EGQF,), w2, b2 = promote([hidden_EGQF], w2, b2)
    return _post_route_down(hidden_EGQF, groups_S, experts_S, weights_S, w2, b2, approximate == "tanh")


def post_route_reference(x_GQD, gate_D, w1_EFD, b1_EF, w2_EDF, b2_ED, *, approximate="none") -> tuple[Tensor, Tensor]:
    """The definition: logits [G, E] of all experts, and the outputs [E, G, Q, D] to choose from."""
    h_EGQF = torch.einsum("gqd,efd->egqf", x_GQD, w1_EFD)
    if b1_EF is not None:
        h_EGQF = h_EGQF + b1_EF[:, None, None]
    y_EGQD = torch.einsum("egqf,edf->egqd", torch.nn.functional.gelu(h_EGQF, approximate=approximate), w2_EDF)
    if b2_ED is not None:
        y_EGQD = y_EGQD + b2_ED[:, None, None]
    return torch.einsum("egd,d->ge", y_EGQD.mean(2), gate_D.reshape(-1)), y_EGQD


def _fold(gate_D: Tensor, w2: list[Tensor]) -> Tensor:
    """w2^T gate of every expert, [E, F], accumulated and kept in fp32."""
    dtype = accumulate_dtype(gate_D, w2[0])
    gate_1D = gate_D.to(dtype).unsqueeze(0)
    if len(w2) > 1:
        return torch.cat([gate_1D @ w.to(dtype) for w in w2])
    # bmm spelled out: matmul of a vector with a batch of matrices takes ten times as long.
    return torch.bmm(gate_1D.expand(len(w2[0]), 1, -1), w2[0].to(dtype)).squeeze(1)


# The operators proper. Where the package is compiled, csrc/post_route_cpu.cpp runs in place of the CPU functions here.


def _up_cpu(
    x_RD: Tensor, Q: int, w1: Sequence[Tensor], b1: Sequence[Tensor], folded_EF: Tensor, tanh: bool
) -> tuple[Tensor, Tensor]:
    """Logits [G, E] without gate . b2, and pre-activations [E, R, F]."""
    (R, _), (E, F) = x_RD.shape, folded_EF.shape
    pre_ERF, act_RF = x_RD.new_empty(E, R, F), x_RD.new_empty(R, F)
    logits_GE = folded_EF.new_empty(R // Q, E)
    for e in range(E):
        affine(x_RD, expert(w1, e), expert(b1, e), out=pre_ERF[e])
        torch.ops.aten.gelu.out(pre_ERF[e], approximate=approximation(tanh), out=act_RF)
        logits_GE[:, e] = act_RF.view(-1, Q, F).mean(1, dtype=folded_EF.dtype) @ folded_EF[e]
    return logits_GE, pre_ERF


def _up_cuda(*args):
    return triton_kernels("ffn").post_route_up(*args)


def _up_fake(x_RD, Q, w1, b1, folded_EF, tanh):
    (R, _), (E, F) = x_RD.shape, folded_EF.shape
    return folded_EF.new_empty(R // Q, E), x_RD.new_empty(E, R, F)


def _up_backward_cpu(
    grad_logits_GE: Tensor | None,
    grad_pre_ERF: Tensor | None,
    x_RD: Tensor,
    Q: int,
    w1: Sequence[Tensor],
    folded_EF: Tensor,
    pre_ERF: Tensor,
    tanh: bool,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w1, b1 (stacked) and folded, each empty where its bit in ``needs`` is 0."""
    (E, R, F), D = pre_ERF.shape, x_RD.shape[1]
    needs_x, needs_w1, needs_b1, needs_folded = from_bits(needs, 4)
    grad_x_RD = x_RD.new_zeros((R, D) if needs_x else 0)
    grad_w1_EFD = x_RD.new_empty((E, F, D) if needs_w1 else 0)
    grad_b1_EF = x_RD.new_empty((E, F) if needs_b1 else 0)
    grad_folded_EF = folded_EF.new_zeros((E, F) if needs_folded else 0)
    act_RF, grad_RF = x_RD.new_empty(R, F), x_RD.new_empty(R, F)
    for e in range(E):
        if grad_logits_GE is not None:
            grad_logit_G = grad_logits_GE[:, e] / Q
            if needs_folded:
                torch.ops.aten.gelu.out(pre_ERF[e], approximate=approximation(tanh), out=act_RF)
                grad_folded_EF[e] = grad_logit_G @ act_RF.view(-1, Q, F).sum(1, dtype=folded_EF.dtype)
            grad_RF.view(-1, Q, F).copy_(torch.outer(grad_logit_G, folded_EF[e]).unsqueeze(1))
            gelu_backward_(grad_RF, pre_ERF[e], tanh)
            if grad_pre_ERF is not None:
                grad_RF += grad_pre_ERF[e]
        else:
            grad_RF = grad_pre_ERF[e]
        if needs_w1:
            torch.mm(grad_RF.T, x_RD, out=grad_w1_EFD[e])
        if needs_b1:
            grad_b1_EF[e] = grad_RF.sum(0)
        if needs_x:
            grad_x_RD.addmm_(grad_RF, expert(w1, e))
    return grad_x_RD, grad_w1_EFD, grad_b1_EF, grad_folded_EF


def _up_backward_cuda(*args):
    return triton_kernels("ffn").post_route_up_backward(*args[:-1], from_bits(args[-1], 4))


def _up_backward_fake(grad_logits_GE, grad_pre_ERF, x_RD, Q, w1, folded_EF, pre_ERF, tanh, needs):
    (E, R, F), D = pre_ERF.shape, x_RD.shape[1]
    needs = from_bits(needs, 4)
    grads = [x_RD.new_empty(s if need else 0) for s, need in zip(((R, D), (E, F, D), (E, F)), needs, strict=False)]
    return *grads, folded_EF.new_empty((E, F) if needs[3] else 0)


def _up_context(ctx, inputs, output):
    x_RD, ctx.Q, w1, b1, folded_EF, ctx.tanh = inputs
    ctx.set_materialize_grads(False)
    ctx.lengths = len(w1), len(b1)
    ctx.save_for_backward(x_RD, folded_EF, output[1], *w1)


def _up_backward(ctx, grad_logits_GE, grad_pre_ERF):
    x_RD, folded_EF, pre_ERF, *w1 = ctx.saved_tensors
    needs_x, _, needs_w1, needs_b1, needs_folded, _ = ctx.needs_input_grad
    len_w1, len_b1 = ctx.lengths
    if grad_logits_GE is None and grad_pre_ERF is None:
        return None, None, [None] * len_w1, [None] * len_b1, None, None
    needs = to_bits([needs_x, any(needs_w1), any(needs_b1), needs_folded])
    grads = _post_route_up_backward(grad_logits_GE, grad_pre_ERF, x_RD, ctx.Q, w1, folded_EF, pre_ERF, ctx.tanh, needs)
    grad_x, grad_w1, grad_b1, grad_folded = grads
    return (
        grad_x if needs_x else None,
        None,
        unstack(grad_w1, len_w1, needs_w1),
        unstack(grad_b1, len_b1, needs_b1),
        grad_folded if needs_folded else None,
        None,
    )


_post_route_up_backward = Operator(
    "post_route_up_backward(Tensor? grad_logits, Tensor? grad_pre, Tensor x, int Q, Tensor[] w1, Tensor folded, "
    "Tensor pre, bool tanh, int needs) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_up_backward_fake,
    cuda=_up_backward_cuda,
    fallback=_up_backward_cpu,
    lists=True,
)
_post_route_up = Operator(
    "post_route_up(Tensor x, int Q, Tensor[] w1, Tensor[] b1, Tensor folded, bool tanh) -> (Tensor, Tensor)",
    fake=_up_fake,
    cuda=_up_cuda,
    fallback=_up_cpu,
    setup_context=_up_context,
    backward=_up_backward,
    lists=True,
    cast=(0, 2, 3),  # x and the parameters, not the folded gate
)


def _down_cpu(
    pre_EGQF: Tensor,
    groups_S: Tensor,
    experts_S: Tensor,
    weights_S: Tensor | None,
    w2: Sequence[Tensor],
    b2: Sequence[Tensor],
    tanh: bool,
) -> Tensor:
    E, G, Q, F = pre_EGQF.shape
    _check_range("groups", groups_S, G)
    _check_range("experts", experts_S, E)
    D = w2[0].shape[-2]
    y_SQD = pre_EGQF.new_empty(len(groups_S), Q, D)
    for e, chosen in _by_expert(experts_S, E):
        act_nF = pre_EGQF[e].index_select(0, groups_S[chosen]).view(-1, F)
        torch.ops.aten.gelu_(act_nF, approximate=approximation(tanh))
        y_nD = act_nF.new_empty(len(act_nF), D)
        affine(act_nF, expert(w2, e), expert(b2, e), out=y_nD)
        y_nQD = y_nD.view(-1, Q, D)
        if weights_S is not None:
            y_nQD *= weights_S[chosen, None, None]
        y_SQD[chosen] = y_nQD
    return y_SQD


def _check_range(name: str, ids: Tensor, size: int) -> None:
    if ids.numel() and (ids.min() < 0 or ids.max() >= size):
        raise ValueError(f"{name} range from {ids.min()} to {ids.max()}; they must be in [0, {size})")


def _by_expert(experts_S: Tensor, E: int) -> list[tuple[int, Tensor]]:
    """Each expert that was chosen, with the places in S where it was."""
    order_S = experts_S.argsort(stable=True)
    chosen = order_S.split(torch.bincount(experts_S, minlength=E).tolist())
    return [(e, places) for e, places in enumerate(chosen) if len(places)]


def _down_cuda(*args):
    return triton_kernels("ffn").post_route_down(*args)


def _down_fake(pre_EGQF, groups_S, experts_S, weights_S, w2, b2, tanh):
    return pre_EGQF.new_empty(groups_S.shape[0], pre_EGQF.shape[2], w2[0].shape[-2])


def _down_backward_cpu(
    grad_SQD: Tensor,
    pre_EGQF: Tensor,
    groups_S: Tensor,
    experts_S: Tensor,
    weights_S: Tensor | None,
    w2: Sequence[Tensor],
    b2: Sequence[Tensor],
    tanh: bool,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of pre, weights, w2, b2 (stacked), each empty where its bit in ``needs`` is 0."""
    (E, _, Q, F), D = pre_EGQF.shape, w2[0].shape[-2]
    needs_pre, needs_weights, needs_w2, needs_b2 = from_bits(needs, 4)
    grad_pre_EGQF = pre_EGQF.new_zeros(pre_EGQF.shape if needs_pre else 0)
    grad_weights_S = pre_EGQF.new_empty(len(groups_S) if needs_weights else 0, dtype=accumulate_dtype(pre_EGQF))
    grad_w2_EDF = pre_EGQF.new_zeros((E, D, F) if needs_w2 else 0)
    grad_b2_ED = pre_EGQF.new_zeros((E, D) if needs_b2 else 0)
    for e, chosen in _by_expert(experts_S, E):
        pre_nF = pre_EGQF[e].index_select(0, groups_S[chosen]).view(-1, F)
        grad_y_nD = grad_SQD[chosen].reshape(-1, D)
        grad_nF = grad_y_nD @ expert(w2, e)
        act_nF = torch.nn.functional.gelu(pre_nF, approximate=approximation(tanh))
        if needs_weights:
            grad_n = (grad_nF * act_nF).sum(1, dtype=grad_weights_S.dtype)
            if b2:
                grad_n += grad_y_nD.to(grad_n.dtype) @ expert(b2, e).to(grad_n.dtype)
            grad_weights_S[chosen] = grad_n.view(-1, Q).sum(1)
        if weights_S is not None:
            weights_n1 = weights_S[chosen].to(grad_nF.dtype).repeat_interleave(Q).unsqueeze(1)
            grad_y_nD *= weights_n1
            grad_nF *= weights_n1
        if needs_w2:
            torch.mm(grad_y_nD.T, act_nF, out=grad_w2_EDF[e])
        if needs_b2:
            grad_b2_ED[e] = grad_y_nD.sum(0)
        if needs_pre:
            gelu_backward_(grad_nF, pre_nF, tanh)
            grad_pre_EGQF[e].index_add_(0, groups_S[chosen], grad_nF.view(-1, Q, F))
    if needs_weights:
        grad_weights_S = grad_weights_S.to(weights_S.dtype)
    return grad_pre_EGQF, grad_weights_S, grad_w2_EDF, grad_b2_ED


def _down_backward_cuda(*args):
    return triton_kernels("ffn").post_route_down_backward(*args[:-1], from_bits(args[-1], 4))


def _down_backward_fake(grad_SQD, pre_EGQF, groups_S, experts_S, weights_S, w2, b2, tanh, needs):
    (E, _, _, F), D = pre_EGQF.shape, w2[0].shape[-2]
    needs_pre, needs_weights, needs_w2, needs_b2 = from_bits(needs, 4)
    return (
        pre_EGQF.new_empty(pre_EGQF.shape if needs_pre else 0),
        weights_S.new_empty(weights_S.shape) if needs_weights else pre_EGQF.new_empty(0),
        pre_EGQF.new_empty((E, D, F) if needs_w2 else 0),
        pre_EGQF.new_empty((E, D) if needs_b2 else 0),
    )


def _down_context(ctx, inputs, output):
    pre_EGQF, groups_S, experts_S, weights_S, w2, b2, ctx.tanh = inputs
    ctx.lengths, ctx.has_weights = (len(w2), len(b2)), weights_S is not None
    weights = [weights_S] if ctx.has_weights else []
    ctx.save_for_backward(pre_EGQF, groups_S, experts_S, *weights, *w2, *b2)


def _down_backward(ctx, grad_SQD):
    pre_EGQF, groups_S, experts_S, *rest = ctx.saved_tensors
    weights_S = rest.pop(0) if ctx.has_weights else None
    len_w2, len_b2 = ctx.lengths
    needs_pre, _, _, needs_weights, needs_w2, needs_b2, _ = ctx.needs_input_grad
    needs = to_bits([needs_pre, needs_weights, any(needs_w2), any(needs_b2)])
    grad_pre, grad_weights, grad_w2, grad_b2 = _post_route_down_backward(
        grad_SQD, pre_EGQF, groups_S, experts_S, weights_S, rest[:len_w2], rest[len_w2:], ctx.tanh, needs
    )
    return (
        grad_pre if needs_pre else None,
        None,
        None,
        grad_weights if needs_weights else None,
        unstack(grad_w2, len_w2, needs_w2),
        unstack(grad_b2, len_b2, needs_b2),
        None,
    )


_post_route_down_backward = Operator(
    "post_route_down_backward(Tensor grad, Tensor pre, Tensor groups, Tensor experts, Tensor? weights, Tensor[] w2, "
    "Tensor[] b2, bool tanh, int needs) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_down_backward_fake,
    cuda=_down_backward_cuda,
    fallback=_down_backward_cpu,
    lists=True,
)
_post_route_down = Operator(
    "post_route_down(Tensor pre, Tensor groups, Tensor experts, Tensor? weights, Tensor[] w2, Tensor[] b2, bool tanh) "
    "-> Tensor",
    fake=_down_fake,
    cuda=_down_cuda,
    fallback=_down_cpu,
    setup_context=_down_context,
    backward=_down_backward,
    lists=True,
    cast=(0, 4, 5),  # hidden and the parameters, not the weights
)
