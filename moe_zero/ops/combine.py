"""Sum of a token's expert outputs by weight, plus residual, then LayerNorm, in one pass.

Legend of shape suffixes: T tokens, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_zero.ops._library import accumulate_dtype, check_float, check_same_device, register_autocast, triton_kernels

ROWS_PER_BLOCK = 256
"""Tokens that the CPU implementation takes at a time, so that they stay in cache from the sum to the LayerNorm."""


def combine(
    y_TKD: Tensor,
    weights_TK: Tensor | None = None,
    residual_TD: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    norm_bias_D: Tensor | None = None,
    *,
    eps: float = 1e-12,
) -> Tensor:
    """``LayerNorm(sum over k of weights[t, k] * y[t, k] + residual[t])``.

    Args:
        y_TKD: [T, K, D], the outputs of each token's experts.
        weights_TK: [T, K] floats of any dtype; ``None`` for ones.
        residual_TD: [T, D], or ``None``.
        norm_weight_D, norm_bias_D: [D]; without ``norm_weight_D`` there is no LayerNorm.
        eps: of the LayerNorm, added to the variance.

    Returns:
        [T, D], in the dtype that ``y`` and the residual promote to; sum and LayerNorm are computed in fp32.
        Differentiable in all tensors, once.

    Raises:
        ValueError: shapes that don't fit, tensors on different devices, a bias without a weight.
        TypeError: a dtype that is not a float, or fp64 on CUDA.

    Source: Ba et al., arXiv 1607.06450.
    """
    given = {"weights": weights_TK, "residual": residual_TD, "norm_weight": norm_weight_D, "norm_bias": norm_bias_D}
    check_float(y=y_TKD, **given)
    check_same_device(y=y_TKD, **given)
    if y_TKD.dim() != 3 or y_TKD.shape[1] == 0:
        raise ValueError(f"y has shape {tuple(y_TKD.shape)}; it must be [T, K, D] with K at least 1")
    T, K, D = y_TKD.shape
    shapes = {"weights": (T, K), "residual": (T, D), "norm_weight": (D,), "norm_bias": (D,)}
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; for y of {tuple(y_TKD.shape)} it must be {shapes[name]}"
            )
    if norm_bias_D is not None and norm_weight_D is None:
        raise ValueError("norm_bias is given without norm_weight; pass both, or neither for no LayerNorm")
    return _combine(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps)[0]


def combine_reference(
    y_TKD, weights_TK=None, residual_TD=None, norm_weight_D=None, norm_bias_D=None, *, eps=1e-12
) -> Tensor:
    """The definition of :func:`combine`."""
    z_TD = y_TKD.sum(1) if weights_TK is None else (weights_TK.to(y_TKD.dtype).unsqueeze(-1) * y_TKD).sum(1)
    if residual_TD is not None:
        z_TD = z_TD + residual_TD
    if norm_weight_D is None:
        return z_TD
    return torch.nn.functional.layer_norm(z_TD, z_TD.shape[-1:], norm_weight_D, norm_bias_D, eps)


def _out_dtype(y_TKD: Tensor, residual_TD: Tensor | None) -> torch.dtype:
    return y_TKD.dtype if residual_TD is None else torch.promote_types(y_TKD.dtype, residual_TD.dtype)


@torch.library.custom_op("moe_zero::combine", mutates_args=(), device_types="cpu")
def _combine(
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    norm_bias_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and reciprocal standard deviation of each row [T], empty without LayerNorm."""
    T, _, D = y_TKD.shape
    out_TD = y_TKD.new_empty(T, D, dtype=_out_dtype(y_TKD, residual_TD))
    dtype = accumulate_dtype(out_TD)
    mean_T, rstd_T = (y_TKD.new_empty(0 if norm_weight_D is None else T, dtype=dtype) for _ in range(2))
    weight, bias = (None if p is None else p.to(dtype) for p in (norm_weight_D, norm_bias_D))
    for rows in _row_blocks(T):
        z = _weighted_sum(y_TKD, weights_TK, residual_TD, rows, dtype)
        if norm_weight_D is not None:
            z, mean, rstd = torch.native_layer_norm(z, [D], weight, bias, eps)
            mean_T[rows], rstd_T[rows] = mean.squeeze(1), rstd.squeeze(1)
        out_TD[rows] = z
    return out_TD, mean_T, rstd_T


def _row_blocks(T: int) -> list[slice]:
    return [slice(begin, min(begin + ROWS_PER_BLOCK, T)) for begin in range(0, T, ROWS_PER_BLOCK)]


def _weighted_sum(y_TKD, weights_TK, residual_TD, rows: slice, dtype: torch.dtype) -> Tensor:
    """What the LayerNorm sees of some rows; always a tensor of its own."""
    y_nKD = y_TKD[rows].to(dtype)
    if weights_TK is None:
        z_nD = y_nKD.sum(1)
    else:
        weights_nK = weights_TK[rows].to(dtype)
        z_nD = y_nKD[:, 0] * weights_nK[:, :1]
        for k in range(1, y_nKD.shape[1]):
            z_nD.addcmul_(y_nKD[:, k], weights_nK[:, k : k + 1])
    return z_nD if residual_TD is None else z_nD.add_(residual_TD[rows])


@_combine.register_kernel("cuda")
def _(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps):
    out_dtype = _out_dtype(y_TKD, residual_TD)
    return triton_kernels("combine").combine_forward(
        y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps, out_dtype
    )


@_combine.register_fake
def _(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps):
    T, _, D = y_TKD.shape
    out_TD = y_TKD.new_empty(T, D, dtype=_out_dtype(y_TKD, residual_TD))
    stats = [out_TD.new_empty(0 if norm_weight_D is None else T, dtype=accumulate_dtype(out_TD)) for _ in range(2)]
    return out_TD, *stats


@torch.library.custom_op("moe_zero::combine_backward", mutates_args=(), device_types="cpu")
def _combine_backward(
    grad_TD: Tensor,
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    norm_bias_D: Tensor | None,
    mean_T: Tensor,
    rstd_T: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y, weights, residual, norm weight and norm bias, each empty where ``needs`` is false."""
    (T, _, D), dtype = y_TKD.shape, accumulate_dtype(grad_TD)
    grads = _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)
    grad_y_TKD, grad_weights_TK, grad_residual_TD, grad_norm_weight_D, grad_norm_bias_D = grads
    normalized = norm_weight_D is not None
    if normalized:
        norm_weight_D = norm_weight_D.to(dtype)
        sums_D = torch.zeros(2, D, dtype=dtype)
    for rows in _row_blocks(T):
        grad_nD = grad_TD[rows].to(dtype)
        if normalized:
            z_nD = _weighted_sum(y_TKD, weights_TK, residual_TD, rows, dtype)
            mean_n1, rstd_n1 = mean_T[rows].unsqueeze(1), rstd_T[rows].unsqueeze(1)
            grad_nD, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
                grad_nD.contiguous(), z_nD, [D], mean_n1, rstd_n1, norm_weight_D, norm_weight_D, [True, True, True]
            )
            sums_D[0] += grad_weight
            sums_D[1] += grad_bias
        if needs[0]:
            grad_y_TKD[rows] = grad_nD.unsqueeze(1)
            if weights_TK is not None:
                grad_y_TKD[rows] = grad_nD.unsqueeze(1) * weights_TK[rows].to(dtype).unsqueeze(2)
        if needs[1]:
            grad_weights_TK[rows] = torch.linalg.vecdot(y_TKD[rows].to(dtype), grad_nD.unsqueeze(1))
        if needs[2]:
            grad_residual_TD[rows] = grad_nD
    if needs[3]:
        grad_norm_weight_D.copy_(sums_D[0])
    if needs[4]:
        grad_norm_bias_D.copy_(sums_D[1])
    return grads


def _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs) -> tuple[Tensor, ...]:
    tensors = (y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D)
    return tuple(
        tensor.new_empty(tensor.shape) if need else y_TKD.new_empty(0)
        for tensor, need in zip(tensors, needs, strict=True)
    )


@_combine_backward.register_kernel("cuda")
def _(grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, mean_T, rstd_T, needs):
    grads = _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)
    triton_kernels("combine").combine_backward(
        grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, mean_T, rstd_T, grads
    )
    return grads


@_combine_backward.register_fake
def _(grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, mean_T, rstd_T, needs):
    return _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)


def _setup_context(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.present = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None), *output[1:])


def _backward(ctx, grad_TD, _mean, _rstd):
    *tensors, mean_T, rstd_T = ctx.saved_tensors
    tensors = iter(tensors)
    inputs = [next(tensors) if present else None for present in ctx.present]
    needs = list(ctx.needs_input_grad[:5])
    grads = _combine_backward(grad_TD, *inputs, mean_T, rstd_T, needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


_combine.register_autograd(_backward, setup_context=_setup_context)
register_autocast(_combine)
register_autocast(_combine_backward)
