"""Router product, softmax, top-k and routing statistics in one pass over the tokens, and the gradient of all of it.

The forward kernel sits at the bandwidth limit for the usual few experts: a token's hidden row is read once and
everything about its routing is derived in registers.

Legend of shape suffixes: T tokens, Q rows averaged per token (1 for token routing), D hidden size, E experts (padded
to the tile), K experts per token, P programs of a grid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import GateConfig, gate_config

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _sort_keys(logits_TE, e_E, E, BLOCK_E: tl.constexpr):
    """Distinct int64 keys, larger for larger logits and, among equal ones, for the lower expert index.

    Integers make the order total: NaN counts as the largest value, as in torch.topk, and can neither select an expert
    twice nor one outside of [0, E).
    """
    bits = logits_TE.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(logits_TE == 0, 0, ordered)  # -0 and +0 tie
    ordered = tl.where(logits_TE != logits_TE, 0x7FFFFFFF, ordered)
    keys_TE = (ordered.to(tl.int64) << 32) + (BLOCK_E - 1 - e_E)[None, :].to(tl.int64)
    return tl.where((e_E < E)[None, :], keys_TE, -0x7FFFFFFFFFFFFFFF)


@triton.jit
def _mean_row(x_ptr, t, d_D, Q, D, stride_t, stride_q, stride_d, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 mean over the Q rows of one token, columns ``d_D``."""
    sum_D = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, Q, BLOCK_Q):
        q_Q = start + tl.arange(0, BLOCK_Q)
        offsets = t * stride_t + q_Q[:, None].to(tl.int64) * stride_q + d_D[None, :].to(tl.int64) * stride_d
        x_QD = tl.load(x_ptr + offsets, mask=(q_Q < Q)[:, None] & (d_D < D)[None, :], other=0.0)
        sum_D += tl.sum(x_QD.to(tl.float32), axis=0)
    return sum_D / Q


@triton.jit(do_not_specialize=["T"])
def gate_forward_kernel(
    x_ptr,
    router_ptr,
    probs_ptr,  # [T, E]
    logsumexp_ptr,  # [T]
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K]
    counts_ptr,  # [P, E]
    importance_ptr,  # [P, E]
    T,
    Q,
    E,
    D,
    stride_xt,
    stride_xq,
    stride_xd,
    stride_re,
    stride_rd,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    POOLED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    program = tl.program_id(0)
    t_T = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.arange(0, BLOCK_E)
    in_T = t_T < T
    in_E = e_E < E

    logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, D, BLOCK_D):
        d_D = start + tl.arange(0, BLOCK_D)
        in_D = d_D < D
        offsets = e_E[:, None].to(tl.int64) * stride_re + d_D[None, :].to(tl.int64) * stride_rd
        router_ED = tl.load(router_ptr + offsets, mask=in_E[:, None] & in_D[None, :], other=0.0)
        if POOLED:
            mean_D = _mean_row(
                x_ptr, program.to(tl.int64), d_D, Q, D, stride_xt, stride_xq, stride_xd, BLOCK_Q, BLOCK_D
            )
            logits_TE += tl.sum(mean_D[None, :] * router_ED.to(tl.float32), axis=1)[None, :]
        else:
            offsets = t_T[:, None] * stride_xt + d_D[None, :].to(tl.int64) * stride_xd
            x_TD = tl.load(x_ptr + offsets, mask=in_T[:, None] & in_D[None, :], other=0.0)
            logits_TE = tl.dot(x_TD.to(DOT_DTYPE), tl.trans(router_ED.to(DOT_DTYPE)), logits_TE, input_precision="ieee")

    masked_TE = tl.where(in_E[None, :], logits_TE, float("-inf"))
    max_T = tl.max(masked_TE, axis=1)
    exp_TE = tl.exp(masked_TE - max_T[:, None])
    sum_T = tl.sum(exp_TE, axis=1)
    probs_TE = exp_TE / sum_T[:, None]
    tl.store(logsumexp_ptr + t_T, max_T + tl.log(sum_T), mask=in_T)
    in_TE = in_T[:, None] & in_E[None, :]
    tl.store(probs_ptr + t_T[:, None] * E + e_E[None, :], probs_TE, mask=in_TE)

    # rank_TE: which of the K places an expert took, K where it took none.
    keys_TE = _sort_keys(logits_TE, e_E, E, BLOCK_E)
    rank_TE = tl.full((BLOCK_T, BLOCK_E), K, tl.int32)
    for place in range(K):
        best_TE = keys_TE == tl.max(keys_TE, axis=1)[:, None]
        rank_TE = tl.where(best_TE, place, rank_TE)
        keys_TE = tl.where(best_TE, -0x7FFFFFFFFFFFFFFF - 1, keys_TE)
    chosen_TE = (rank_TE < K) & in_TE

    weights_TE = probs_TE
    if RENORMALIZE:
        total_T = tl.sum(tl.where(chosen_TE, probs_TE, 0.0), axis=1)
        weights_TE = probs_TE / tl.where(in_T, total_T, 1.0)[:, None]
    place_TE = t_T[:, None] * K + rank_TE
    tl.store(weights_ptr + place_TE, weights_TE, mask=chosen_TE)
    e_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int64) + e_E[None, :]
    tl.store(ids_ptr + place_TE, e_TE, mask=chosen_TE)

    # One partial sum per program, added up afterwards in a fixed order: deterministic, unlike atomics.
    tl.store(counts_ptr + program * E + e_E, tl.sum(chosen_TE.to(tl.int32), axis=0), mask=in_E)
    tl.store(importance_ptr + program * E + e_E, tl.sum(tl.where(in_TE, probs_TE, 0.0), axis=0), mask=in_E)


@triton.jit(do_not_specialize=["T"])
def gate_backward_kernel(
    router_ptr,
    probs_ptr,  # [T, E]
    ids_ptr,  # [T, K]
    grad_weights_ptr,  # [T, K]
    grad_probs_ptr,  # [T, E]
    grad_importance_ptr,  # [E]
    grad_logsumexp_ptr,  # [T]
    grad_logits_ptr,  # [T, E]
    grad_x_ptr,  # [T, Q, D]
    T,
    Q,
    E,
    D,
    stride_re,
    stride_rd,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    POOLED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    program = tl.program_id(0)
    t_T = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.arange(0, BLOCK_E)
    in_T = t_T < T
    in_E = e_E < E
    in_TE = in_T[:, None] & in_E[None, :]

    offsets_TE = t_T[:, None] * E + e_E[None, :]
    probs_TE = tl.load(probs_ptr + offsets_TE, mask=in_TE, other=0.0)
    grad_TE = tl.load(grad_probs_ptr + offsets_TE, mask=in_TE, other=0.0)
    grad_TE += tl.load(grad_importance_ptr + e_E, mask=in_E, other=0.0)[None, :]

    chosen_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
    grad_chosen_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for place in range(K):
        id_T = tl.load(ids_ptr + t_T * K + place, mask=in_T, other=-1)
        grad_T = tl.load(grad_weights_ptr + t_T * K + place, mask=in_T, other=0.0)
        here_TE = id_T[:, None] == e_E[None, :]
        chosen_TE = chosen_TE | here_TE
        grad_chosen_TE = tl.where(here_TE, grad_T[:, None], grad_chosen_TE)
    if RENORMALIZE:
        kept_TE = tl.where(chosen_TE, probs_TE, 0.0)
        total_T = tl.sum(kept_TE, axis=1)
        total_T = tl.where(in_T, total_T, 1.0)
        mean_T = tl.sum(grad_chosen_TE * kept_TE, axis=1) / total_T
        grad_chosen_TE = tl.where(chosen_TE, (grad_chosen_TE - mean_T[:, None]) / total_T[:, None], 0.0)
    grad_TE += grad_chosen_TE

    grad_lse_T = tl.load(grad_logsumexp_ptr + t_T, mask=in_T, other=0.0)
    grad_logits_TE = probs_TE * (grad_TE - tl.sum(probs_TE * grad_TE, axis=1)[:, None] + grad_lse_T[:, None])
    tl.store(grad_logits_ptr + offsets_TE, grad_logits_TE, mask=in_TE)

    for start in range(0, D, BLOCK_D):
        d_D = start + tl.arange(0, BLOCK_D)
        in_D = d_D < D
        offsets = e_E[:, None].to(tl.int64) * stride_re + d_D[None, :].to(tl.int64) * stride_rd
        router_ED = tl.load(router_ptr + offsets, mask=in_E[:, None] & in_D[None, :], other=0.0).to(tl.float32)
        if POOLED:
            # BLOCK_T is 1: every row of the token gets the gradient of the mean, divided by their number.
            grad_D = tl.sum(tl.sum(grad_logits_TE, axis=0)[:, None] * router_ED, axis=0) / Q
            for start_q in range(0, Q, BLOCK_Q):
                q_Q = start_q + tl.arange(0, BLOCK_Q)
                offsets_QD = (program.to(tl.int64) * Q + q_Q[:, None]) * D + d_D[None, :]
                grad_QD = tl.broadcast_to(grad_D[None, :], (BLOCK_Q, BLOCK_D))
                tl.store(grad_x_ptr + offsets_QD, grad_QD, mask=(q_Q < Q)[:, None] & in_D[None, :])
        else:
            grad_TD = tl.dot(grad_logits_TE, router_ED, input_precision=PRECISION)
            tl.store(grad_x_ptr + t_T[:, None] * D + d_D[None, :], grad_TD, mask=in_T[:, None] & in_D[None, :])


@triton.jit(do_not_specialize=["T", "tokens_per_program"])
def gate_router_gradient_kernel(
    x_ptr,
    grad_logits_ptr,  # [T, E]
    partials_ptr,  # [P, E, D]
    T,
    tokens_per_program,
    Q,
    E,
    D,
    stride_xt,
    stride_xq,
    stride_xd,
    POOLED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum over a range of tokens of grad_logits^T x: one of P partial sums."""
    d_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    program = tl.program_id(1)
    e_E = tl.arange(0, BLOCK_E)
    in_D = d_D < D
    in_E = e_E < E
    first = program.to(tl.int64) * tokens_per_program
    last = tl.minimum(first + tokens_per_program, T)

    sum_ED = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_T):
        t_T = start + tl.arange(0, BLOCK_T)
        in_T = t_T < last
        grad_TE = tl.load(
            grad_logits_ptr + t_T[:, None] * E + e_E[None, :], mask=in_T[:, None] & in_E[None, :], other=0.0
        )
        offsets = t_T[:, None] * stride_xt + d_D[None, :].to(tl.int64) * stride_xd
        mask = in_T[:, None] & in_D[None, :]
        x_TD = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if POOLED:
            for _ in range(1, Q):
                offsets += stride_xq
                x_TD += tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            x_TD = x_TD / Q
        sum_ED = tl.dot(tl.trans(grad_TE), x_TD, sum_ED, input_precision=PRECISION)
    offsets = (program.to(tl.int64) * E + e_E[:, None]) * D + d_D[None, :]
    tl.store(partials_ptr + offsets, sum_ED, mask=in_E[:, None] & in_D[None, :])


def gate_forward(
    x_TQD: Tensor, router_ED: Tensor, k: int, renormalize: bool, config: GateConfig | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights [T, K], ids [T, K], probabilities [T, E], counts [E], importance [E] and log-sum-exp [T]."""
    T, Q, D = x_TQD.shape
    E = router_ED.shape[0]
    config = config or gate_config(T, E, rows=Q, fp32=torch.float32 in (x_TQD.dtype, router_ED.dtype))
    programs = triton.cdiv(T, config.block_t)
    f32 = {"dtype": torch.float32, "device": x_TQD.device}
    probs_TE, logsumexp_T = torch.empty(T, E, **f32), torch.empty(T, **f32)
    weights_TK = torch.empty(T, k, **f32)
    ids_TK = torch.empty(T, k, dtype=torch.int64, device=x_TQD.device)
    counts_PE = torch.empty(programs, E, dtype=torch.int32, device=x_TQD.device)
    importance_PE = torch.empty(programs, E, **f32)
    if T > 0:
        low_precision = x_TQD.dtype == router_ED.dtype and not INTERPRETED
        with torch.cuda.device_of(x_TQD):
            gate_forward_kernel[(programs,)](
                x_TQD,
                router_ED,
                probs_TE,
                logsumexp_T,
                weights_TK,
                ids_TK,
                counts_PE,
                importance_PE,
                T,
                Q,
                E,
                D,
                *x_TQD.stride(),
                *router_ED.stride(),
                K=k,
                RENORMALIZE=renormalize,
                POOLED=Q > 1,
                DOT_DTYPE=TRITON_DTYPE[x_TQD.dtype] if low_precision else tl.float32,
                BLOCK_T=config.block_t,
                BLOCK_E=config.block_e,
                BLOCK_D=config.block_d,
                BLOCK_Q=config.block_q,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return weights_TK, ids_TK, probs_TE, counts_PE.sum(0), importance_PE.sum(0), logsumexp_T


def gate_backward(
    grad_weights_TK: Tensor,
    grad_probs_TE: Tensor,
    grad_importance_E: Tensor,
    grad_logsumexp_T: Tensor,
    x_TQD: Tensor,
    router_ED: Tensor,
    ids_TK: Tensor,
    probs_TE: Tensor,
    renormalize: bool,
    config: GateConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, Q, D] and of the router [E, D]."""
    T, Q, D = x_TQD.shape
    E = router_ED.shape[0]
    config = config or gate_config(T, E, rows=Q, fp32=torch.float32 in (x_TQD.dtype, router_ED.dtype))
    grad_x_TQD = torch.empty(T, Q, D, dtype=x_TQD.dtype, device=x_TQD.device)
    if T == 0:
        return grad_x_TQD, torch.zeros_like(router_ED, memory_format=torch.contiguous_format)
    grad_logits_TE = torch.empty_like(probs_TE)
    # tf32 keeps the ten bits that bf16 and fp16 inputs have, and unlike fp16 the range that gradients need.
    precision = "ieee" if torch.float32 in (x_TQD.dtype, router_ED.dtype) else "tf32"
    tiles_d = triton.cdiv(D, config.block_d)
    block_t = min(32, max(16, config.block_t))
    # Enough programs to fill any GPU of today, but no more than there are tiles of tokens.
    splits = min(triton.cdiv(T, block_t), max(1, 512 // tiles_d))
    tokens_per_program = triton.cdiv(triton.cdiv(T, splits), block_t) * block_t
    splits = triton.cdiv(T, tokens_per_program)
    partials_PED = torch.empty(splits, E, D, dtype=torch.float32, device=x_TQD.device)
    blocks = {"BLOCK_E": config.block_e, "BLOCK_D": config.block_d, "POOLED": Q > 1, "PRECISION": precision}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    with torch.cuda.device_of(x_TQD):
        gate_backward_kernel[(triton.cdiv(T, config.block_t),)](
            router_ED,
            probs_TE,
            ids_TK,
            grad_weights_TK.contiguous(),
            grad_probs_TE.contiguous(),
            grad_importance_E.contiguous(),
            grad_logsumexp_T.contiguous(),
            grad_logits_TE,
            grad_x_TQD,
            T,
            Q,
            E,
            D,
            *router_ED.stride(),
            K=ids_TK.shape[1],
            RENORMALIZE=renormalize,
            BLOCK_T=config.block_t,
            BLOCK_Q=config.block_q,
            **blocks,
            **launch,
        )
        gate_router_gradient_kernel[(tiles_d, splits)](
            x_TQD,
            grad_logits_TE,
            partials_PED,
            T,
            tokens_per_program,
            Q,
            E,
            D,
            *x_TQD.stride(),
            BLOCK_T=block_t,
            **blocks,
            **launch,
        )
    return grad_x_TQD, partials_PED.sum(0).to(router_ED.dtype)


TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
