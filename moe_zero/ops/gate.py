"""Router: product with the gate's weight, softmax, top-k, and the sums that balancing losses need.

Legend of shape suffixes: T tokens, Q rows averaged per token, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_zero.ops._library import (
    Operator,
    accumulate_dtype,
    check_float,
    check_integer,
    check_same_device,
    check_tensor,
    triton_kernels,
)


class GateOutput(NamedTuple):
    """Where tokens go and how the load is spread. Float results are fp32 (fp64 for fp64 inputs)."""

    weights: Tensor
    """[T, K]: probability of each chosen expert, divided by their sum with ``renormalize``. Differentiable."""
    ids: Tensor
    """[T, K], int64: the chosen experts, most probable first."""
    probs: Tensor
    """[T, E]: softmax over the experts. Differentiable."""
    counts: Tensor
    """[E], int64: how many tokens chose each expert, in any of their K places."""
    importance: Tensor
    """[E]: ``probs`` summed over the tokens. Differentiable."""
    logsumexp: Tensor
    """[T]: of the logits (router z-loss); the logits are ``probs.log() + logsumexp[:, None]``. Differentiable."""


def gate(x: Tensor, router_ED: Tensor, k: int, *, renormalize: bool = False) -> GateOutput:
    """Choose k experts for each token, or for each sequence.

    Args:
        x: [T, D], one row per token; or [T, Q, D], of which the mean over Q is routed (sequence-level routing).
        router_ED: [E, D], the gate's weight. Its dtype may differ from that of ``x``.
        k: experts per token, 1 to E.
        renormalize: divide the k weights of a token by their sum.

    Logits, softmax and everything after are fp32 whatever the inputs' dtypes, also under autocast: rounding must not
    decide where a token goes. Equal logits go to the lower index, as in a stable sort. A row with NaN counts NaN as its
    largest logit and affects its own weights, but not its neighbours.

    Raises:
        ValueError: shapes that don't fit together, k outside of [1, E], tensors on different devices.
        TypeError: a dtype that is not a float, or fp64 on CUDA; k that is no integer.

    Source: Shazeer et al., arXiv 1701.06538 (importance); Fedus et al., arXiv 2101.03961 (probabilities and counts of
    the Switch loss); Zoph et al., arXiv 2202.08906, equation 5 (z-loss).
    """
    check_tensor(x=x, router=router_ED)
    check_float(x=x, router=router_ED)
    check_integer(k=k)
    check_same_device(x=x, router=router_ED)
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}; the gate takes [T, D], or [T, Q, D] to route the mean over Q")
    if router_ED.dim() != 2 or router_ED.shape[1] != x.shape[-1]:
        raise ValueError(
            f"router has shape {tuple(router_ED.shape)}; for x of hidden size {x.shape[-1]} it must be "
            f"[E, {x.shape[-1]}]"
        )
    if not 1 <= k <= router_ED.shape[0]:
        raise ValueError(f"k is {k}; it must be between 1 and the number of experts, {router_ED.shape[0]}")
    if x.shape[-2] == 0 and x.dim() == 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; there must be at least one row to average")
    x_TQD = x.unsqueeze(1) if x.dim() == 2 else x
    return GateOutput(*_gate(x_TQD, router_ED, k, renormalize))


def gate_reference(x: Tensor, router_ED: Tensor, k: int, *, renormalize: bool = False) -> GateOutput:
    """The definition of :func:`gate`, in the dtype of the inputs."""
    x_TD = x.mean(1) if x.dim() == 3 else x
    logits_TE = x_TD @ router_ED.to(x.dtype).T
    probs_TE = logits_TE.softmax(-1)
    ids_TK = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_TK = probs_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    counts_E = torch.nn.functional.one_hot(ids_TK, router_ED.shape[0]).sum((0, 1))
    return GateOutput(weights_TK, ids_TK, probs_TE, counts_E, probs_TE.sum(0), logits_TE.logsumexp(1))


# The operators proper. Where the package is compiled, csrc/gate_cpu.cpp runs in place of the two CPU functions here.


def _gate_cpu(x_TQD: Tensor, router_ED: Tensor, k: int, renormalize: bool) -> tuple[Tensor, ...]:
    dtype = accumulate_dtype(x_TQD, router_ED)
    logits_TE = _mean_rows(x_TQD, dtype) @ router_ED.to(dtype).T
    logsumexp_T = logits_TE.logsumexp(1)
    probs_TE = logits_TE.softmax(1)
    ids_TK = logits_TE.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    weights_TK = probs_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK /= weights_TK.sum(1, keepdim=True)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=router_ED.shape[0])
    return weights_TK, ids_TK, probs_TE, counts_E, probs_TE.sum(0), logsumexp_T


def _mean_rows(x_TQD: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TQD.squeeze(1).to(dtype) if x_TQD.shape[1] == 1 else x_TQD.mean(1, dtype=dtype)


def _gate_cuda(x_TQD, router_ED, k, renormalize):
    return triton_kernels("gate").gate_forward(x_TQD, router_ED, k, renormalize)


def _gate_fake(x_TQD, router_ED, k, renormalize):
    T, E = x_TQD.shape[0], router_ED.shape[0]
    dtype = accumulate_dtype(x_TQD, router_ED)
    return (
        x_TQD.new_empty(T, k, dtype=dtype),
        x_TQD.new_empty(T, k, dtype=torch.int64),
        x_TQD.new_empty(T, E, dtype=dtype),
        x_TQD.new_empty(E, dtype=torch.int64),
        x_TQD.new_empty(E, dtype=dtype),
        x_TQD.new_empty(T, dtype=dtype),
    )


def _gate_backward_cpu(
    grad_weights_TK: Tensor | None,
    grad_probs_TE: Tensor | None,
    grad_importance_E: Tensor | None,
    grad_logsumexp_T: Tensor | None,
    x_TQD: Tensor,
    router_ED: Tensor,
    ids_TK: Tensor,
    probs_TE: Tensor,
    renormalize: bool,
    needs_x: bool,
    needs_router: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and router, each empty where it is not needed."""
    grad_weights_TK, grad_probs_TE, grad_importance_E, grad_logsumexp_T = _zeros_for_none(
        grad_weights_TK, grad_probs_TE, grad_importance_E, grad_logsumexp_T, ids_TK, probs_TE
    )
    T, Q, D = x_TQD.shape
    if renormalize:
        chosen_TK = probs_TE.gather(1, ids_TK)
        total_T1 = chosen_TK.sum(1, keepdim=True)
        mean_T1 = (grad_weights_TK * chosen_TK).sum(1, keepdim=True) / total_T1
        grad_weights_TK = (grad_weights_TK - mean_T1) / total_T1
    grad_TE = (grad_probs_TE + grad_importance_E).scatter_add_(1, ids_TK, grad_weights_TK)
    mean_T1 = (probs_TE * grad_TE).sum(1, keepdim=True)
    grad_logits_TE = grad_TE.sub_(mean_T1).add_(grad_logsumexp_T.unsqueeze(1)).mul_(probs_TE)

    grad_x_TQD, grad_router_ED = x_TQD.new_empty(0), router_ED.new_empty(0)
    if needs_x:
        grad_x_TQD = ((grad_logits_TE / Q) @ router_ED.to(grad_logits_TE.dtype)).to(x_TQD.dtype)
        grad_x_TQD = grad_x_TQD.unsqueeze(1).expand(T, Q, D).contiguous()
    if needs_router:
        grad_router_ED = (grad_logits_TE.T @ _mean_rows(x_TQD, grad_logits_TE.dtype)).to(router_ED.dtype)
    return grad_x_TQD, grad_router_ED


def _zeros_for_none(weights_TK, probs_TE, importance_E, logsumexp_T, ids_TK, like_TE) -> tuple[Tensor, ...]:
    """The gradients of the results, with zeros for those that nobody used."""
    (T, E), K = like_TE.shape, ids_TK.shape[1]
    grads = ((weights_TK, (T, K)), (probs_TE, (T, E)), (importance_E, (E,)), (logsumexp_T, (T,)))
    return tuple(like_TE.new_zeros(shape) if grad is None else grad for grad, shape in grads)


def _gate_backward_cuda(*args):
    *grads, x_TQD, router_ED, ids_TK, probs_TE, renormalize, needs_x, needs_router = args
    grads = _zeros_for_none(*grads, ids_TK, probs_TE)
    grad_x_TQD, grad_router_ED = triton_kernels("gate").gate_backward(
        *grads, x_TQD, router_ED, ids_TK, probs_TE, renormalize
    )
    return (
        grad_x_TQD if needs_x else x_TQD.new_empty(0),
        grad_router_ED if needs_router else router_ED.new_empty(0),
    )


def _gate_backward_fake(*args):
    *_, x_TQD, router_ED, _ids, _probs, _renormalize, needs_x, needs_router = args
    return (
        x_TQD.new_empty(x_TQD.shape if needs_x else 0),
        router_ED.new_empty(router_ED.shape if needs_router else 0),
    )


def _gate_fold(x_BTQD, router_ED, k, renormalize):
    B, T = x_BTQD.shape[:2]
    weights, ids, probs, counts_E, _, logsumexp = (
        result if i in (3, 4) else result.unflatten(0, (B, T))
        for i, result in enumerate(_gate(x_BTQD.flatten(0, 1), router_ED, k, renormalize))
    )
    ids_BN = ids.flatten(1)
    counts_BE = counts_E.new_zeros(B, len(counts_E)).scatter_add(1, ids_BN, torch.ones_like(ids_BN))
    return weights, ids, probs, counts_BE, probs.sum(1), logsumexp


def _setup_context(ctx, inputs, output):
    x_TQD, router_ED, _, ctx.renormalize = inputs
    _, ids_TK, probs_TE, counts_E, _, _ = output
    ctx.mark_non_differentiable(ids_TK, counts_E)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TQD, router_ED, ids_TK, probs_TE)


def _backward(ctx, grad_weights_TK, _ids, grad_probs_TE, _counts, grad_importance_E, grad_logsumexp_T):
    needs_x, needs_router = ctx.needs_input_grad[:2]
    grads = (grad_weights_TK, grad_probs_TE, grad_importance_E, grad_logsumexp_T)
    grad_x, grad_router = _gate_backward(*grads, *ctx.saved_tensors, ctx.renormalize, needs_x, needs_router)
    return grad_x if needs_x else None, grad_router if needs_router else None, None, None


_gate_backward = Operator(
    "gate_backward(Tensor? grad_weights, Tensor? grad_probs, Tensor? grad_importance, Tensor? grad_logsumexp, "
    "Tensor x, Tensor router, Tensor ids, Tensor probs, bool renormalize, bool needs_x, bool needs_router) "
    "-> (Tensor, Tensor)",
    fake=_gate_backward_fake,
    cuda=_gate_backward_cuda,
    fallback=_gate_backward_cpu,
)
_gate = Operator(
    "gate(Tensor x, Tensor router, int k, bool renormalize) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_gate_fake,
    cuda=_gate_cuda,
    fallback=_gate_cpu,
    setup_context=_setup_context,
    backward=_backward,
    rows=(0,),
    fold=_gate_fold,
)
