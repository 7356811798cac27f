"""One step of the beam search over experts, one program per sample.

Legend of shape suffixes: B samples, J beams of a sample that enter, R experts, C = J * R candidates (padded to the
tile), K beams that leave, L experts on a route.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF - 1)


@triton.jit
def beam_step_kernel(
    scores_ptr,  # [B, J]
    probs_ptr,  # [B * J, R]
    routes_ptr,  # [B, J, L]
    out_scores_ptr,  # [B, K]
    parents_ptr,  # [B, K]
    experts_ptr,  # [B, K]
    out_routes_ptr,  # [B, K, L + 1]
    J,
    R,
    L,
    stride_sb,
    stride_sj,
    stride_pp,
    stride_pr,
    stride_rb,
    stride_rj,
    stride_rl,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, BLOCK_C)
    in_C = c_C < J * R
    j_C = c_C // R
    probs_ptrs = probs_ptr + (b * J + j_C) * stride_pp + (c_C % R).to(tl.int64) * stride_pr
    score_C = tl.load(probs_ptrs, mask=in_C, other=0.0).to(tl.float32)
    if not FIRST:
        parent_C = tl.load(scores_ptr + b * stride_sb + j_C * stride_sj, mask=in_C, other=0.0).to(tl.float32)
        score_C = tl.exp(tl.log(score_C) + tl.log(parent_C))

    # Distinct integer keys make the order total: larger scores first, NaN before all, equal scores by index.
    bits = score_C.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score_C == 0, 0, bits)
    bits = tl.where(score_C != score_C, 0x7FFFFFFF, bits)
    keys_C = (bits.to(tl.int64) << 32) + (BLOCK_C - 1 - c_C).to(tl.int64)
    keys_C = tl.where(in_C, keys_C, LOWEST)

    l_L = tl.arange(0, BLOCK_L)
    for k in range(K):
        chosen_C = keys_C == tl.max(keys_C, axis=0)
        spare = k >= J * R
        candidate = tl.sum(tl.where(chosen_C & in_C, c_C, 0))
        candidate = tl.where(spare, (k - J * R) % (J * R), candidate)
        score = tl.sum(tl.where(chosen_C & in_C, score_C, 0.0))
        keys_C = tl.where(chosen_C, LOWEST, keys_C)
        parent = candidate // R
        expert = (candidate % R).to(tl.int64)
        tl.store(out_scores_ptr + b * K + k, tl.where(spare, 0.0, score))
        tl.store(parents_ptr + b * K + k, b * J + parent)
        tl.store(experts_ptr + b * K + k, expert)
        out_route_ptr = out_routes_ptr + (b * K + k) * (L + 1)
        if not FIRST:
            route_ptrs = routes_ptr + b * stride_rb + parent.to(tl.int64) * stride_rj + l_L.to(tl.int64) * stride_rl
            route_L = tl.load(route_ptrs, mask=l_L < L, other=0)
            tl.store(out_route_ptr + l_L, route_L.to(tl.int64), mask=l_L < L)
        tl.store(out_route_ptr + L, expert)


def beam_step(
    scores_BJ: Tensor | None, probs_PR: Tensor, k: int, routes_BJL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, parents, experts [B, K] and routes [B, K, L + 1]; see ``moe_zero.ops.beam_step``."""
    P, R = probs_PR.shape
    B, J = (P, 1) if scores_BJ is None else scores_BJ.shape
    L = 0 if routes_BJL is None else routes_BJL.shape[2]
    device = probs_PR.device
    scores_BK = torch.empty(B, k, dtype=torch.float32, device=device)
    parents_BK, experts_BK = (torch.empty(B, k, dtype=torch.int64, device=device) for _ in range(2))
    routes_BKL = torch.empty(B, k, L + 1, dtype=torch.int64, device=device)
    if B > 0:
        with torch.cuda.device_of(probs_PR):
            beam_step_kernel[(B,)](
                scores_BJ,
                probs_PR,
                routes_BJL,
                scores_BK,
                parents_BK,
                experts_BK,
                routes_BKL,
                J,
                R,
                L,
                *((0, 0) if scores_BJ is None else scores_BJ.stride()),
                *probs_PR.stride(),
                *((0, 0, 0) if routes_BJL is None else routes_BJL.stride()),
                K=k,
                FIRST=scores_BJ is None,
                BLOCK_C=triton.next_power_of_2(J * R),
                BLOCK_L=triton.next_power_of_2(max(L, 1)),
                num_warps=1 if J * R <= 256 else 16,
            )
    return scores_BK, parents_BK, experts_BK, routes_BKL
