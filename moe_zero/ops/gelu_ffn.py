"""Feed-forward of all experts at once: gather, product + bias + GELU, product + bias, token weight, sum.

Legend of shape suffixes: T tokens, D hidden size, F FFN width, E experts, K experts per token, N = T * K pairs of a
token and an expert (E * T in the dense form).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moe_zero.ops._library import (
    Operator,
    accumulate_dtype,
    check_float,
    check_integers,
    check_same_device,
    check_tensor,
    from_bits,
    promote,
    to_bits,
    triton_kernels,
)

Weights = Tensor | Sequence[Tensor]
"""Stacked over the experts, [E, ...], or a sequence of E tensors without the first dimension."""


def gelu_ffn(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    w1_EFD: Weights,
    b1_EF: Weights | None,
    w2_EDF: Weights,
    b2_ED: Weights | None,
    *,
    approximate: str = "none",
    recompute: bool = False,
) -> Tensor:
    """Sum over each token's experts of ``weight * (w2 gelu(w1 x + b1) + b2)``.

    Tokens are grouped by expert inside, without padding or a copy of them in memory on CUDA; an expert without tokens
    costs nothing and gets zero gradients. Results and gradients are the same bit for bit from run to run.

    Args:
        x_TD: [T, D].
        ids_TK: [T, K], integers in [0, E). A token may name an expert twice.
        weights_TK: [T, K] floats of any dtype, or ``None`` for ones.
        w1_EFD, b1_EF, w2_EDF, b2_ED: [E, F, D], [E, F], [E, D, F], [E, D], in any strides; each stacked or as a
            sequence of E tensors, which are read where they are. Biases may be ``None``.
        approximate: ``"none"`` for the exact GELU (erf), ``"tanh"`` for its approximation.
        recompute: keep no [N, F] pre-activations for the backward pass, at the cost of one more product there.

    Returns:
        [T, D], in the dtype that ``x`` and the weights promote to (autocast's under autocast). Products are in that
        dtype and accumulate in fp32. Differentiable in x, weights and all parameters, once.

    Raises:
        ValueError: shapes that don't fit, tensors on different devices, an expert id out of range (on CUDA the last is
            an assertion of the device, before any product runs).
        TypeError: a dtype that is not a float, or fp64 on CUDA.

    Source: Shazeer et al., arXiv 1701.06538, equation 1; Hendrycks and Gimpel, arXiv 1606.08415.
    """
    w1, b1, w2, b2 = _check(x_TD, w1_EFD, b1_EF, w2_EDF, b2_ED, approximate)
    check_tensor(ids=ids_TK)
    if ids_TK.dim() != 2 or ids_TK.shape[0] != x_TD.shape[0] or ids_TK.shape[1] == 0:
        shape, tokens = tuple(ids_TK.shape), x_TD.shape[0]
        raise ValueError(f"ids have shape {shape}; for {tokens} tokens they must be [T, K] with K at least 1")
    check_integers(ids=ids_TK)
    check_float(weights=weights_TK)
    check_same_device(x=x_TD, ids=ids_TK, weights=weights_TK)
    if weights_TK is not None and weights_TK.shape != ids_TK.shape:
        raise ValueError(f"weights have shape {tuple(weights_TK.shape)}, but ids have {tuple(ids_TK.shape)}")
    return _run(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, approximate, recompute)


def gelu_ffn_dense(
    x_TD: Tensor,
    w1_EFD: Weights,
    b1_EF: Weights | None,
    w2_EDF: Weights,
    b2_ED: Weights | None,
    *,
    approximate: str = "none",
    recompute: bool = False,
) -> Tensor:
    """Every expert on every row: [T, D] to [E, T, D]. Arguments as in :func:`gelu_ffn`; E = 1 is a plain FFN."""
    w1, b1, w2, b2 = _check(x_TD, w1_EFD, b1_EF, w2_EDF, b2_ED, approximate)
    return _run(x_TD, None, None, w1, b1, w2, b2, approximate, recompute)


def gelu_ffn_reference(x_TD, ids_TK, weights_TK, w1_EFD, b1_EF, w2_EDF, b2_ED, *, approximate="none") -> Tensor:
    """The definition of :func:`gelu_ffn`, for stacked weights."""
    y_ETD = gelu_ffn_dense_reference(x_TD, w1_EFD, b1_EF, w2_EDF, b2_ED, approximate=approximate)
    chosen_TKE = torch.nn.functional.one_hot(ids_TK.long(), y_ETD.shape[0]).to(y_ETD.dtype)
    if weights_TK is not None:
        chosen_TKE = chosen_TKE * weights_TK.to(y_ETD.dtype).unsqueeze(-1)
    return torch.einsum("te,etd->td", chosen_TKE.sum(1), y_ETD)


def gelu_ffn_dense_reference(x_TD, w1_EFD, b1_EF, w2_EDF, b2_ED, *, approximate="none") -> Tensor:
    """The definition of :func:`gelu_ffn_dense`, for stacked weights."""
    h_ETF = x_TD @ w1_EFD.transpose(1, 2)
    if b1_EF is not None:
        h_ETF = h_ETF + b1_EF.unsqueeze(1)
    y_ETD = torch.nn.functional.gelu(h_ETF, approximate=approximate) @ w2_EDF.transpose(1, 2)
    return y_ETD if b2_ED is None else y_ETD + b2_ED.unsqueeze(1)


def check_experts(
    hidden_size: int, w1_EFD: Weights, b1_EF: Weights | None, w2_EDF: Weights, b2_ED: Weights | None
) -> list[list[Tensor]]:
    """The experts' parameters as lists, see :func:`check_parameters`."""
    for name, weights in (("w1", w1_EFD), ("w2", w2_EDF)):
        if weights is None:
            raise TypeError(f"{name} is None; only biases may be left out")
    _check_weights("w1", w1_EFD)
    if len(w1_EFD) == 0:
        raise ValueError("w1 is empty; there must be at least one expert")
    E, F = len(w1_EFD), w1_EFD[0].shape[-2] if w1_EFD[0].dim() == 2 else 0
    shapes = {"w1": (F, hidden_size), "b1": (F,), "w2": (hidden_size, F), "b2": (hidden_size,)}
    return check_parameters(E, shapes, {"w1": w1_EFD, "b1": b1_EF, "w2": w2_EDF, "b2": b2_ED})


def check_parameters(E: int, shapes: dict[str, tuple], given: dict[str, Weights | None]) -> list[list[Tensor]]:
    """Parameters of E experts as lists: a single stacked tensor, or one tensor per expert if there are several.

    Raises as :func:`gelu_ffn` does where one is not of the shape in ``shapes`` (with E in front if it is stacked).
    """
    lists = []
    for name, weights in given.items():
        if weights is None:
            lists.append([])
            continue
        _check_weights(name, weights)
        if len(weights) != E:
            raise ValueError(f"{name} is of {len(weights)} experts; there are {E}")
        stacked = isinstance(weights, Tensor)
        tensors = {name: weights} if stacked else {f"{name}[{i}]": tensor for i, tensor in enumerate(weights)}
        expected = (E, *shapes[name]) if stacked else shapes[name]
        for label, tensor in tensors.items():
            if tensor.shape != expected:
                raise ValueError(f"{label} has shape {tuple(tensor.shape)}; with {E} experts it must be {expected}")
        check_float(**tensors)
        lists.append([weights] if stacked else [weights[0].unsqueeze(0)] if E == 1 else list(weights))
    flat = [tensor for tensors in lists for tensor in tensors]
    check_same_device(**{f"parameter {i} of the experts": tensor for i, tensor in enumerate(flat)})
    return lists


def _check_weights(name: str, weights: Weights) -> None:
    """Raise ``TypeError`` unless these are tensors, stacked or in a sequence."""
    if isinstance(weights, Tensor):
        if weights.dim() == 0:
            raise ValueError(f"{name} has no dimensions; it must be stacked over the experts, or a sequence of tensors")
        return
    if isinstance(weights, str) or not isinstance(weights, Sequence | torch.nn.ParameterList):
        raise TypeError(f"{name} is a {type(weights).__name__}; it must be a tensor or a sequence of tensors")
    check_tensor(**{f"{name}[{i}]": tensor for i, tensor in enumerate(weights)})


def _check(x_TD, w1_EFD, b1_EF, w2_EDF, b2_ED, approximate):
    check_tensor(x=x_TD)
    check_float(x=x_TD)
    if x_TD.dim() != 2:
        raise ValueError(f"x has shape {tuple(x_TD.shape)}; it must be [T, D]")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    lists = check_experts(x_TD.shape[1], w1_EFD, b1_EF, w2_EDF, b2_ED)
    check_same_device(x=x_TD, w1=lists[0][0])
    return lists


def _run(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, approximate, recompute):
    (x_TD,), w1, b1, w2, b2 = promote([x_TD], w1, b1, w2, b2)
    inputs = [x_TD, *w1, *b1, *w2, *b2] + ([] if weights_TK is None else [weights_TK])
    save = not recompute and torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return _gelu_ffn(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, approximate == "tanh", save)[0]


# The operator proper. Beside y it returns what the backward pass needs: the pre-activations [N, F] in sorted order
# (empty without `save`), the pair t * K + k at each sorted place [N], and the place where each expert begins [E + 1].
# In the dense form place e * T + t is expert e on row t, and the last two are empty. Where the package is compiled,
# csrc/gelu_ffn_cpu.cpp runs in place of the two CPU functions here.


def _gelu_ffn_cpu(
    x_TD: Tensor,
    ids_TK: Tensor | None,
    weights_TK: Tensor | None,
    w1: Sequence[Tensor],
    b1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b2: Sequence[Tensor],
    tanh: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, D = x_TD.shape
    E, F = num_experts(w1), w1[0].shape[-2]
    if ids_TK is None:
        order_N, offsets_E = (torch.empty(0, dtype=torch.int32) for _ in range(2))
        groups = _Groups.dense(T, E)
    else:
        order_N, offsets_E = _sort_by_expert(ids_TK, E)
        groups = _Groups.sparse(order_N, offsets_E, ids_TK.shape[1])
    N, longest = groups.offsets[-1], groups.longest
    pre_NF = x_TD.new_empty(N if save else 0, F)
    y_ND = x_TD.new_empty(N, D)
    # One buffer for all experts: fresh memory costs a page fault every 4 KiB, which is more than GELU itself.
    act_buffer = x_TD.new_empty(longest, F)
    weights_N1 = groups.sorted_weights(weights_TK)
    for e, places in groups:
        x_nD = groups.tokens(x_TD, places)
        act_nF = act_buffer[: places.stop - places.start]
        pre_nF = pre_NF[places] if save else act_nF
        affine(x_nD, expert(w1, e), expert(b1, e), out=pre_nF)
        torch.ops.aten.gelu.out(pre_nF, approximate=approximation(tanh), out=act_nF)
        y_nD = y_ND[places]
        affine(act_nF, expert(w2, e), expert(b2, e), out=y_nD)
        if weights_N1 is not None:
            y_nD *= weights_N1[places]
    return groups.sum_over_experts(y_ND), pre_NF, order_N, offsets_E


def num_experts(weights: Sequence[Tensor]) -> int:
    """E, of a list as :func:`check_experts` makes them."""
    return weights[0].shape[0] if len(weights) == 1 else len(weights)


def expert(weights: Sequence[Tensor], e: int) -> Tensor | None:
    """The parameter of one expert; ``None`` for a bias that there is not."""
    if not weights:
        return None
    return weights[0][e] if len(weights) == 1 else weights[e]


def affine(x_nD: Tensor, w_FD: Tensor, b_F: Tensor | None, out: Tensor) -> None:
    if b_F is None:
        torch.mm(x_nD, w_FD.T, out=out)
    else:
        torch.addmm(b_F, x_nD, w_FD.T, out=out)


def gelu_backward_(grad: Tensor, pre: Tensor, tanh: bool) -> None:
    """Turn the gradient of gelu(pre) into that of pre, in place."""
    torch.ops.aten.gelu_backward.grad_input(grad, pre, approximate=approximation(tanh), grad_input=grad)


def approximation(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def _sort_by_expert(ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Pairs in order of expert, tokens ascending within each [N], and where each expert begins [E + 1]."""
    ids_N = ids_TK.reshape(-1)
    if ids_N.numel() and (ids_N.min() < 0 or ids_N.max() >= E):
        raise ValueError(f"ids range from {ids_N.min()} to {ids_N.max()}; for {E} experts they must be in [0, {E})")
    offsets_E = torch.zeros(E + 1, dtype=torch.int32)
    torch.cumsum(torch.bincount(ids_N, minlength=E), 0, out=offsets_E[1:])
    return ids_N.argsort(stable=True).int(), offsets_E


@dataclass(frozen=True)
class _Groups:
    """Which places of the sorted order belong to which expert, on the CPU."""

    order_N: Tensor | None
    token_N: Tensor | None
    offsets: list[int]
    experts_per_token: int

    @classmethod
    def dense(cls, T: int, E: int) -> _Groups:
        return cls(None, None, [T * e for e in range(E + 1)], E)

    @classmethod
    def sparse(cls, order_N: Tensor, offsets_E: Tensor, K: int) -> _Groups:
        return cls(order_N, order_N if K == 1 else order_N // K, offsets_E.tolist(), K)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, with their places."""
        for e, (begin, end) in enumerate(pairwise(self.offsets)):
            if end > begin:
                yield e, slice(begin, end)

    def without_rows(self) -> list[int]:
        return [e for e, (begin, end) in enumerate(pairwise(self.offsets)) if end == begin]

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in pairwise(self.offsets))

    def tokens(self, x_TD: Tensor, places: slice) -> Tensor:
        """The row of ``x`` for each place."""
        if self.order_N is None:
            return x_TD
        return x_TD.index_select(0, self.token_N[places])

    def sorted_weights(self, weights_TK: Tensor | None) -> Tensor | None:
        """The token weight of each place [N, 1]."""
        return None if weights_TK is None else weights_TK.reshape(-1, 1).index_select(0, self.order_N)

    def sum_over_experts(self, y_ND: Tensor) -> Tensor:
        """[N, D] to [T, D], summed over the K places of each token; to [E, T, D] in the dense form."""
        if self.order_N is None:
            return y_ND.unflatten(0, (self.experts_per_token, -1 if len(y_ND) else 0))
        place_N = torch.empty_like(self.order_N)
        place_N[self.order_N] = torch.arange(len(place_N), dtype=place_N.dtype)
        if len(place_N) == 0:
            return y_ND
        # Gathers and adds in one pass over y, in fp32 for the 16-bit dtypes.
        return torch.nn.functional.embedding_bag(place_N.view(-1, self.experts_per_token), y_ND, mode="sum")


def _gelu_ffn_fake(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, tanh, save):
    (T, D), E, F = x_TD.shape, num_experts(w1), w1[0].shape[-2]
    dense = ids_TK is None
    N = E * T if dense else ids_TK.numel()
    return (
        x_TD.new_empty((E, T, D) if dense else (T, D)),
        x_TD.new_empty(N if save else 0, F),
        x_TD.new_empty(0 if dense else N, dtype=torch.int32),
        x_TD.new_empty(0 if dense else E + 1, dtype=torch.int32),
    )


def _gelu_ffn_backward_cpu(
    grad_y: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    w1: Sequence[Tensor],
    b1: Sequence[Tensor],
    w2: Sequence[Tensor],
    b2: Sequence[Tensor],
    pre_NF: Tensor,
    order_N: Tensor,
    offsets_E: Tensor,
    dense: bool,
    experts_per_token: int,
    tanh: bool,
    saved: bool,
    needs: int,
) -> tuple[Tensor, ...]:
    """Gradients of x, weights, w1, b1, w2, b2 (stacked), each empty where its bit in ``needs`` is 0."""
    needs = from_bits(needs, 6)
    (T, D), E, F = x_TD.shape, num_experts(w1), w1[0].shape[-2]
    groups = _Groups.dense(T, E) if dense else _Groups.sparse(order_N, offsets_E, experts_per_token)
    N, longest = groups.offsets[-1], groups.longest
    needs_x, needs_weights, needs_w1, needs_b1, needs_w2, needs_b2 = needs
    grad_w1_EFD = x_TD.new_empty((E, F, D) if needs_w1 else 0)
    grad_b1_EF = x_TD.new_empty((E, F) if needs_b1 else 0)
    grad_w2_EDF = x_TD.new_empty((E, D, F) if needs_w2 else 0)
    grad_b2_ED = x_TD.new_empty((E, D) if needs_b2 else 0)
    for e in groups.without_rows():
        for grad, needed in zip((grad_w1_EFD, grad_b1_EF, grad_w2_EDF, grad_b2_ED), needs[2:], strict=True):
            if needed:
                grad[e].zero_()
    grad_weights_N = x_TD.new_empty(N if needs_weights else 0, dtype=accumulate_dtype(x_TD))
    grad_x_ND = x_TD.new_empty(N if needs_x else 0, D)
    act_buffer, grad_buffer, pre_buffer, product_buffer = (x_TD.new_empty(longest, F) for _ in range(4))
    weights_N1 = groups.sorted_weights(weights_TK)
    grad_y = grad_y.contiguous()

    for e, places in groups:
        n = places.stop - places.start
        x_nD = groups.tokens(x_TD, places)
        grad_y_nD = grad_y[e] if dense else groups.tokens(grad_y, places)
        act_nF, grad_nF = act_buffer[:n], grad_buffer[:n]
        if saved:
            pre_nF = pre_NF[places]
        else:
            pre_nF = pre_buffer[:n]
            affine(x_nD, expert(w1, e), expert(b1, e), out=pre_nF)

        torch.mm(grad_y_nD, expert(w2, e), out=grad_nF)
        if needs_weights or needs_w2:
            torch.ops.aten.gelu.out(pre_nF, approximate=approximation(tanh), out=act_nF)
        if needs_weights:
            # <grad_y, w2 act + b2> from what is at hand, without keeping or recomputing y.
            grad_n = torch.mul(grad_nF, act_nF, out=product_buffer[:n]).sum(1, dtype=grad_weights_N.dtype)
            if b2:
                grad_n += grad_y_nD.to(grad_n.dtype) @ expert(b2, e).to(grad_n.dtype)
            grad_weights_N[order_N[places]] = grad_n
        # From here on the token weight is a factor of every gradient. It goes into the D-wide operands, not the F-wide.
        if weights_N1 is not None:
            weights_n1 = weights_N1[places].to(x_TD.dtype)
            grad_y_nD *= weights_n1
            x_nD *= weights_n1
        if needs_w2:
            torch.mm(grad_y_nD.T, act_nF, out=grad_w2_EDF[e])
        if needs_b2:
            grad_b2_ED[e] = grad_y_nD.sum(0)
        if needs_x or needs_w1 or needs_b1:
            gelu_backward_(grad_nF, pre_nF, tanh)
        if needs_w1:
            torch.mm(grad_nF.T, x_nD, out=grad_w1_EFD[e])
        if needs_b1:
            grad_b1_EF[e] = grad_nF.sum(0) if weights_N1 is None else (weights_n1.T @ grad_nF).squeeze(0)
        if needs_x:
            grad_x_nD = grad_x_ND[places]
            torch.mm(grad_nF, expert(w1, e), out=grad_x_nD)
            if weights_N1 is not None:
                grad_x_nD *= weights_n1

    grad_x_TD = grad_x_ND
    if needs_x:
        grad_x_TD = groups.sum_over_experts(grad_x_ND)
        grad_x_TD = grad_x_TD.sum(0) if dense and E > 1 else grad_x_TD.reshape(T, D)
    grad_weights_TK = grad_weights_N
    if needs_weights:
        grad_weights_TK = grad_weights_N.view(weights_TK.shape).to(weights_TK.dtype)
    return grad_x_TD, grad_weights_TK, grad_w1_EFD, grad_b1_EF, grad_w2_EDF, grad_b2_ED


def _gelu_ffn_backward_fake(
    grad_y,
    x_TD,
    weights_TK,
    w1,
    b1,
    w2,
    b2,
    pre_NF,
    order_N,
    offsets_E,
    dense,
    experts_per_token,
    tanh,
    saved,
    needs,
):
    (T, D), E, F = x_TD.shape, num_experts(w1), w1[0].shape[-2]
    needs = from_bits(needs, 6)
    shapes = ((T, D), None, (E, F, D), (E, F), (E, D, F), (E, D))
    grads = [x_TD.new_empty(shape if need and shape else 0) for shape, need in zip(shapes, needs, strict=True)]
    if needs[1]:
        grads[1] = weights_TK.new_empty(weights_TK.shape)
    return tuple(grads)


def _gelu_ffn_cuda(*args):
    return triton_kernels("ffn").gelu_ffn_forward(*args)


def _gelu_ffn_backward_cuda(*args):
    return triton_kernels("ffn").gelu_ffn_backward(*args[:-1], from_bits(args[-1], 6))


def _gelu_ffn_fold(x_BTD, ids_BTK, weights_BTK, w1, b1, w2, b2, tanh, save):
    (B, T), E = x_BTD.shape[:2], num_experts(w1)
    rows = [None if tensor is None else tensor.flatten(0, 1) for tensor in (x_BTD, ids_BTK, weights_BTK)]
    y, pre, order, offsets = _gelu_ffn(*rows, w1, b1, w2, b2, tanh, save)
    if ids_BTK is None:
        pre = pre.unflatten(0, (E, B, T)).transpose(0, 1).flatten(1, 2) if save else pre.expand(B, *pre.shape)
        return y.unflatten(1, (B, T)).transpose(0, 1), pre, order.expand(B, 0), offsets.expand(B, 0)
    # The rows of one b keep their order when those of all others are left out, so that sorting the places by b, stably,
    # gives for each b what sorting its rows by expert would have given.
    N = ids_BTK[0].numel()
    order = order.long()
    place_BN = (order // max(N, 1)).argsort(stable=True).unflatten(0, (B, N))
    counts_BE = offsets.new_zeros(B, E).scatter_add(1, ids_BTK.flatten(1).long(), offsets.new_ones(B, N))
    offsets_BE = torch.nn.functional.pad(counts_BE.cumsum(1, dtype=torch.int32), (1, 0))
    pre = pre[place_BN] if save else pre.expand(B, *pre.shape)
    return y.unflatten(0, (B, T)), pre, (order[place_BN] % max(N, 1)).int(), offsets_BE


def _setup_context(ctx, inputs, output):
    x_TD, ids_TK, weights_TK, w1, b1, w2, b2, ctx.tanh, ctx.saved = inputs
    _, *sorted_state = output
    ctx.mark_non_differentiable(*sorted_state)
    ctx.set_materialize_grads(False)
    ctx.dense, ctx.experts_per_token = ids_TK is None, 1 if ids_TK is None else ids_TK.shape[1]
    ctx.lengths = [len(w1), len(b1), len(w2), len(b2)]
    ctx.has_weights = weights_TK is not None
    saved = [x_TD, weights_TK] if ctx.has_weights else [x_TD]
    ctx.save_for_backward(*saved, *w1, *b1, *w2, *b2, *sorted_state)


def _backward(ctx, grad_y, *_):
    if grad_y is None:
        return None, None, None, *([None] * length for length in ctx.lengths), None, None
    tensors = list(ctx.saved_tensors)
    x_TD = tensors.pop(0)
    weights_TK = tensors.pop(0) if ctx.has_weights else None
    parameters = []
    for length in ctx.lengths:
        parameters.append(tensors[:length])
        tensors = tensors[length:]
    needs_x, _, needs_weights, *needs_lists, _, _ = ctx.needs_input_grad
    needs = [needs_x, needs_weights, *(any(need) for need in needs_lists)]
    grad_x, grad_weights, *grads = _gelu_ffn_backward(
        grad_y,
        x_TD,
        weights_TK,
        *parameters,
        *tensors,
        ctx.dense,
        ctx.experts_per_token,
        ctx.tanh,
        ctx.saved,
        to_bits(needs),
    )
    lists = [unstack(grad, length, need) for grad, length, need in zip(grads, ctx.lengths, needs_lists, strict=True)]
    return grad_x if needs_x else None, None, grad_weights if needs_weights else None, *lists, None, None


def unstack(grad: Tensor, length: int, needs: Sequence[bool]) -> list[Tensor | None]:
    """The stacked gradient in the form of the parameter list that it belongs to."""
    grads = [grad] if length == 1 else grad.unbind(0) if any(needs) else [None] * length
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


_gelu_ffn_backward = Operator(
    "gelu_ffn_backward(Tensor grad, Tensor x, Tensor? weights, Tensor[] w1, Tensor[] b1, Tensor[] w2, Tensor[] b2, "
    "Tensor pre, Tensor order, Tensor offsets, bool dense, int experts_per_token, bool tanh, bool saved, int needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_gelu_ffn_backward_fake,
    cuda=_gelu_ffn_backward_cuda,
    fallback=_gelu_ffn_backward_cpu,
    lists=True,
)
_gelu_ffn = Operator(
    "gelu_ffn(Tensor x, Tensor? ids, Tensor? weights, Tensor[] w1, Tensor[] b1, Tensor[] w2, Tensor[] b2, bool tanh, "
    "bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_gelu_ffn_fake,
    cuda=_gelu_ffn_cuda,
    fallback=_gelu_ffn_cpu,
    setup_context=_setup_context,
    backward=_backward,
    rows=(0, 1, 2),
    fold=_gelu_ffn_fold,
    lists=True,
    cast=(0, 3, 4, 5, 6),  # x and the parameters, not the token weights
)
