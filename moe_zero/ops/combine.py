"""Sum of a token's expert outputs by weight, plus residual, then LayerNorm, in one pass.

Legend of shape suffixes: T tokens, K experts per token, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_zero.ops._library import (
    Operator,
    accumulate_dtype,
    check_float,
    check_same_device,
    check_tensor,
    to_bits,
    triton_kernels,
)


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
    check_tensor(y=y_TKD)
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


# The operators proper. Where the package is compiled, csrc/combine_cpu.cpp runs in place of the two CPU functions here.


def _combine_cpu(
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    norm_bias_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and reciprocal standard deviation of each row [T], empty without LayerNorm."""
    out_dtype = _out_dtype(y_TKD, residual_TD)
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    z_TD = _weighted_sum(y_TKD, weights_TK, residual_TD, dtype)
    if norm_weight_D is None:
        return z_TD.to(out_dtype), z_TD.new_empty(0), z_TD.new_empty(0)
    weight_D, bias_D = (None if p is None else p.to(dtype) for p in (norm_weight_D, norm_bias_D))
    out_TD, mean_T1, rstd_T1 = torch.native_layer_norm(z_TD, z_TD.shape[1:], weight_D, bias_D, eps)
    return out_TD.to(out_dtype), mean_T1.squeeze(1), rstd_T1.squeeze(1)


def _weighted_sum(y_TKD, weights_TK, residual_TD, dtype: torch.dtype) -> Tensor:
    """What the LayerNorm sees; always a tensor of its own."""
    y_TKD = y_TKD.to(dtype)
    z_TD = y_TKD.sum(1) if weights_TK is None else (weights_TK.to(dtype).unsqueeze(-1) * y_TKD).sum(1)
    return z_TD if residual_TD is None else z_TD.add_(residual_TD)


def _combine_cuda(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps):
    out_dtype = _out_dtype(y_TKD, residual_TD)
    return triton_kernels("combine").combine_forward(
        y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps, out_dtype
    )


def _combine_fake(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, eps):
    T, _, D = y_TKD.shape
    out_TD = y_TKD.new_empty(T, D, dtype=_out_dtype(y_TKD, residual_TD))
    stats = [out_TD.new_empty(0 if norm_weight_D is None else T, dtype=accumulate_dtype(out_TD)) for _ in range(2)]
    return out_TD, *stats


def _combine_backward_cpu(
    grad_TD: Tensor,
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    norm_bias_D: Tensor | None,
    mean_T: Tensor,
    rstd_T: Tensor,
    needs: int,
) -> tuple[Tensor, ...]:
    """Gradients of y, weights, residual, norm weight and norm bias, each empty where its bit in ``needs`` is 0."""
    dtype = accumulate_dtype(grad_TD)
    grads = _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)
    grad_y_TKD, grad_weights_TK, grad_residual_TD, *grad_norm = grads
    inner_TD = grad_TD.to(dtype).contiguous()
    if norm_weight_D is not None:
        z_TD = _weighted_sum(y_TKD, weights_TK, residual_TD, dtype)
        weight_D = norm_weight_D.to(dtype)
        inner_TD, *sums = torch.ops.aten.native_layer_norm_backward(
            inner_TD, z_TD, z_TD.shape[1:], mean_T[:, None], rstd_T[:, None], weight_D, weight_D, [True, True, True]
        )
        for grad_D, sum_D in zip(grad_norm, sums, strict=True):
            if grad_D.numel():
                grad_D.copy_(sum_D)
    if needs & 1:
        weights_TK1 = 1 if weights_TK is None else weights_TK.to(dtype).unsqueeze(-1)
        grad_y_TKD.copy_(inner_TD.unsqueeze(1) * weights_TK1)
    if needs & 2:
        grad_weights_TK.copy_((y_TKD.to(dtype) * inner_TD.unsqueeze(1)).sum(-1))
    if needs & 4:
        grad_residual_TD.copy_(inner_TD)
    return grads


def _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs) -> tuple[Tensor, ...]:
    tensors = (y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D)
    return tuple(
        tensor.new_empty(tensor.shape) if needs >> i & 1 else y_TKD.new_empty(0) for i, tensor in enumerate(tensors)
    )


def _combine_backward_cuda(grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, mean_T, rstd_T, needs):
    grads = _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)
    triton_kernels("combine").combine_backward(
        grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, mean_T, rstd_T, grads
    )
    return grads


def _combine_backward_fake(grad_TD, y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, mean_T, rstd_T, needs):
    return _empty_gradients(y_TKD, weights_TK, residual_TD, norm_weight_D, norm_bias_D, needs)


def _combine_fold(y_BTKD, weights_BTK, residual_BTD, norm_weight_D, norm_bias_D, eps):
    B = y_BTKD.shape[0]
    rows = [None if tensor is None else tensor.flatten(0, 1) for tensor in (y_BTKD, weights_BTK, residual_BTD)]
    return tuple(
        result.unflatten(0, (B, result.shape[0] // B)) for result in _combine(*rows, norm_weight_D, norm_bias_D, eps)
    )


def _setup_context(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.present = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None), *output[1:])


def _backward(ctx, grad_TD, _mean, _rstd):
    *tensors, mean_T, rstd_T = ctx.saved_tensors
    tensors = iter(tensors)
    inputs = [next(tensors) if present else None for present in ctx.present]
    needs = to_bits(ctx.needs_input_grad[:5])
    grads = _combine_backward(grad_TD, *inputs, mean_T, rstd_T, needs)
    return *(grad if needs >> i & 1 else None for i, grad in enumerate(grads)), None


_combine_backward = Operator(
    "combine_backward(Tensor grad, Tensor y, Tensor? weights, Tensor? residual, Tensor? norm_weight, "
    "Tensor? norm_bias, Tensor mean, Tensor rstd, int needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_combine_backward_fake,
    cuda=_combine_backward_cuda,
    fallback=_combine_backward_cpu,
)
_combine = Operator(
    "combine(Tensor y, Tensor? weights, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_combine_fake,
    cuda=_combine_cuda,
    fallback=_combine_cpu,
    setup_context=_setup_context,
    backward=_backward,
    rows=(0, 1, 2),
    fold=_combine_fold,
)
