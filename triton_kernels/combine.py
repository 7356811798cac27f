"""Weighted sum over a token's experts, residual and LayerNorm in one pass, and its gradient.

One program takes a few whole rows: everything between the loads of the expert outputs and the store of the result stays
in registers, so that the kernel sits at the bandwidth limit. The backward pass recomputes the sum from the same inputs
rather than reading it back.

Legend of shape suffixes: T tokens (rows of a program), K experts per token, D hidden size (padded to the tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning

MOST_PARTIAL_SUMS = 1024
"""Programs of a backward pass: enough to fill the GPU, few enough that their sums are added up quickly."""


@triton.jit
def _sum_of_experts(
    y_ptr,
    weights_ptr,
    residual_ptr,
    t_T,
    d_D,
    mask_TD,
    stride_yt,
    stride_yk,
    stride_yd,
    stride_wt,
    stride_wk,
    stride_rt,
    stride_rd,
    T,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    sum_TD = tl.zeros(mask_TD.shape, tl.float32)
    y_ptrs = y_ptr + t_T[:, None] * stride_yt + d_D[None, :].to(tl.int64) * stride_yd
    for k in range(K):
        y_TD = tl.load(y_ptrs, mask=mask_TD, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            y_TD *= tl.load(weights_ptr + t_T * stride_wt + k * stride_wk, mask=t_T < T, other=0.0).to(tl.float32)[
                :, None
            ]
        sum_TD += y_TD
        y_ptrs += stride_yk
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + t_T[:, None] * stride_rt + d_D[None, :].to(tl.int64) * stride_rd
        sum_TD += tl.load(residual_ptrs, mask=mask_TD, other=0.0).to(tl.float32)
    return sum_TD


@triton.jit(do_not_specialize=["T"])
def combine_forward_kernel(
    y_ptr,
    weights_ptr,
    residual_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,  # [T, D]
    mean_ptr,  # [T]
    rstd_ptr,  # [T]
    T,
    D,
    stride_yt,
    stride_yk,
    stride_yd,
    stride_wt,
    stride_wk,
    stride_rt,
    stride_rd,
    eps,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d_D = tl.arange(0, BLOCK_D)
    in_T = t_T < T
    in_D = d_D < D
    mask_TD = in_T[:, None] & in_D[None, :]
    out_TD = _sum_of_experts(
        y_ptr,
        weights_ptr,
        residual_ptr,
        t_T,
        d_D,
        mask_TD,
        stride_yt,
        stride_yk,
        stride_yd,
        stride_wt,
        stride_wk,
        stride_rt,
        stride_rd,
        T,
        K,
        HAS_WEIGHTS,
        HAS_RESIDUAL,
    )
    if HAS_NORM:
        mean_T = tl.sum(out_TD, axis=1) / D
        centered_TD = tl.where(in_D[None, :], out_TD - mean_T[:, None], 0.0)
        rstd_T = 1.0 / tl.sqrt(tl.sum(centered_TD * centered_TD, axis=1) / D + eps)
        tl.store(mean_ptr + t_T, mean_T, mask=in_T)
        tl.store(rstd_ptr + t_T, rstd_T, mask=in_T)
        gain_D = tl.load(norm_weight_ptr + d_D, mask=in_D, other=0.0).to(tl.float32)
        out_TD = centered_TD * rstd_T[:, None] * gain_D[None, :]
        if HAS_NORM_BIAS:
            out_TD += tl.load(norm_bias_ptr + d_D, mask=in_D, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + t_T[:, None] * D + d_D[None, :], out_TD, mask=mask_TD)


@triton.jit(do_not_specialize=["T", "tiles_per_program"])
def combine_backward_kernel(
    grad_ptr,  # [T, D]
    y_ptr,
    weights_ptr,
    residual_ptr,
    norm_weight_ptr,
    mean_ptr,  # [T]
    rstd_ptr,  # [T]
    grad_y_ptr,  # [T, K, D]
    grad_weights_ptr,  # [T, K]
    grad_residual_ptr,  # [T, D]
    gain_partials_ptr,  # [P, D]
    bias_partials_ptr,  # [P, D]
    T,
    tiles_per_program,
    D,
    stride_yt,
    stride_yk,
    stride_yd,
    stride_wt,
    stride_wk,
    stride_rt,
    stride_rd,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NEEDS_Y: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr,
    NEEDS_RESIDUAL: tl.constexpr,
    SUMS_IN_REGISTERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of a range of rows, and the range's partial sums of the gradients of the LayerNorm's parameters."""
    program = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK_D)
    in_D = d_D < D
    gain_partials_ptrs = gain_partials_ptr + program * D + d_D
    bias_partials_ptrs = bias_partials_ptr + program * D + d_D
    gain_grad_D = tl.zeros((BLOCK_D,), tl.float32)
    bias_grad_D = tl.zeros((BLOCK_D,), tl.float32)
    for tile in range(0, tiles_per_program):
        t_T = (program * tiles_per_program + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        in_T = t_T < T
        mask_TD = in_T[:, None] & in_D[None, :]
        grad_TD = tl.load(grad_ptr + t_T[:, None] * D + d_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        if HAS_NORM:
            sum_TD = _sum_of_experts(
                y_ptr,
                weights_ptr,
                residual_ptr,
                t_T,
                d_D,
                mask_TD,
                stride_yt,
                stride_yk,
                stride_yd,
                stride_wt,
                stride_wk,
                stride_rt,
                stride_rd,
                T,
                K,
                HAS_WEIGHTS,
                HAS_RESIDUAL,
            )
            mean_T = tl.load(mean_ptr + t_T, mask=in_T, other=0.0)
            rstd_T = tl.load(rstd_ptr + t_T, mask=in_T, other=0.0)
            normal_TD = tl.where(in_D[None, :], (sum_TD - mean_T[:, None]) * rstd_T[:, None], 0.0)
            gain_grad_D += tl.sum(grad_TD * normal_TD, axis=0)
            bias_grad_D += tl.sum(grad_TD, axis=0)
            if not SUMS_IN_REGISTERS:
                # They wait where they end up, in L2. The barriers: another thread may have stored what one loads.
                before = in_D & (tile > 0)
                gain_grad_D += tl.load(gain_partials_ptrs, mask=before, other=0.0)
                bias_grad_D += tl.load(bias_partials_ptrs, mask=before, other=0.0)
                tl.debug_barrier()
                tl.store(gain_partials_ptrs, gain_grad_D, mask=in_D)
                tl.store(bias_partials_ptrs, bias_grad_D, mask=in_D)
                tl.debug_barrier()
                gain_grad_D = tl.zeros((BLOCK_D,), tl.float32)
                bias_grad_D = tl.zeros((BLOCK_D,), tl.float32)
            grad_TD *= tl.load(norm_weight_ptr + d_D, mask=in_D, other=0.0).to(tl.float32)[None, :]
            along_T = tl.sum(grad_TD * normal_TD, axis=1) / D
            mean_grad_T = tl.sum(grad_TD, axis=1) / D
            grad_TD = (grad_TD - mean_grad_T[:, None] - normal_TD * along_T[:, None]) * rstd_T[:, None]
        if NEEDS_RESIDUAL:
            tl.store(grad_residual_ptr + t_T[:, None] * D + d_D[None, :], grad_TD, mask=mask_TD)
        for k in range(K):
            if NEEDS_Y:
                grad_y_TD = grad_TD
                if HAS_WEIGHTS:
                    weight_T = tl.load(weights_ptr + t_T * stride_wt + k * stride_wk, mask=in_T, other=0.0)
                    grad_y_TD = grad_TD * weight_T.to(tl.float32)[:, None]
                tl.store(grad_y_ptr + (t_T[:, None] * K + k) * D + d_D[None, :], grad_y_TD, mask=mask_TD)
            if NEEDS_WEIGHTS:
                y_ptrs = y_ptr + t_T[:, None] * stride_yt + k * stride_yk + d_D[None, :].to(tl.int64) * stride_yd
                y_TD = tl.load(y_ptrs, mask=mask_TD, other=0.0).to(tl.float32)
                tl.store(grad_weights_ptr + t_T * K + k, tl.sum(y_TD * grad_TD, axis=1), mask=in_T)
    if HAS_NORM and SUMS_IN_REGISTERS:
        tl.store(gain_partials_ptrs, gain_grad_D, mask=in_D)
        tl.store(bias_partials_ptrs, bias_grad_D, mask=in_D)


def _shared_arguments(y_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor | None, num_rows: int) -> dict:
    D = y_TKD.shape[2]
    config = tuning.combine_config(D, num_rows)
    weight_strides = (0, 0) if weights_TK is None else weights_TK.stride()
    residual_strides = (0, 0) if residual_TD is None else residual_TD.stride()
    names = ("stride_yt", "stride_yk", "stride_yd", "stride_wt", "stride_wk", "stride_rt", "stride_rd")
    return {
        **dict(zip(names, (*y_TKD.stride(), *weight_strides, *residual_strides), strict=True)),
        "D": D,
        "K": y_TKD.shape[1],
        "HAS_WEIGHTS": weights_TK is not None,
        "HAS_RESIDUAL": residual_TD is not None,
        "BLOCK_T": config.block_t,
        "BLOCK_D": config.block_d,
        "num_warps": config.num_warps,
    }


def combine_forward(
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    norm_bias_D: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [T, D], and mean and reciprocal standard deviation of each row [T], empty without LayerNorm."""
    T, _, D = y_TKD.shape
    out_TD = torch.empty(T, D, dtype=out_dtype, device=y_TKD.device)
    stats = T if norm_weight_D is not None else 0
    mean_T, rstd_T = (torch.empty(stats, dtype=torch.float32, device=y_TKD.device) for _ in range(2))
    if T > 0:
        arguments = _shared_arguments(y_TKD, weights_TK, residual_TD, T)
        with torch.cuda.device_of(y_TKD):
            combine_forward_kernel[(triton.cdiv(T, arguments["BLOCK_T"]),)](
                y_TKD,
                weights_TK,
                residual_TD,
                _contiguous(norm_weight_D),
                _contiguous(norm_bias_D),
                out_TD,
                mean_T,
                rstd_T,
                T,
                eps=float(eps),
                HAS_NORM=norm_weight_D is not None,
                HAS_NORM_BIAS=norm_bias_D is not None,
                **arguments,
            )
    return out_TD, mean_T, rstd_T


def combine_backward(
    grad_TD: Tensor,
    y_TKD: Tensor,
    weights_TK: Tensor | None,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor | None,
    mean_T: Tensor,
    rstd_T: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill ``grads`` (of y, weights, residual, norm weight, norm bias), skipping those that are empty."""
    T, _, D = y_TKD.shape
    grad_y_TKD, grad_weights_TK, grad_residual_TD, grad_gain_D, grad_bias_D = grads
    arguments = _shared_arguments(y_TKD, weights_TK, residual_TD, T)
    # The registers of 16 warps do not hold rows of more than 16 KiB beside the sums over a program's rows.
    wide = arguments["BLOCK_D"] * grad_TD.element_size() > 16384
    if wide:
        arguments["num_warps"] = 32
    tiles = triton.cdiv(T, arguments["BLOCK_T"])
    tiles_per_program = max(1, triton.cdiv(tiles, MOST_PARTIAL_SUMS))
    programs = triton.cdiv(tiles, tiles_per_program)
    partials_2PD = torch.empty(2, programs, D, dtype=torch.float32, device=y_TKD.device)
    if T > 0:
        with torch.cuda.device_of(y_TKD):
            combine_backward_kernel[(programs,)](
                grad_TD.contiguous(),
                y_TKD,
                weights_TK,
                residual_TD,
                _contiguous(norm_weight_D),
                mean_T,
                rstd_T,
                grad_y_TKD,
                grad_weights_TK,
                grad_residual_TD,
                partials_2PD[0],
                partials_2PD[1],
                T,
                tiles_per_program,
                HAS_NORM=norm_weight_D is not None,
                NEEDS_Y=grad_y_TKD.numel() > 0,
                NEEDS_WEIGHTS=grad_weights_TK.numel() > 0,
                NEEDS_RESIDUAL=grad_residual_TD.numel() > 0,
                SUMS_IN_REGISTERS=not wide,
                **arguments,
            )
    for grad, partials_PD in ((grad_gain_D, partials_2PD[0]), (grad_bias_D, partials_2PD[1])):
        if grad.numel() > 0:
            grad.copy_(partials_PD.sum(0))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
