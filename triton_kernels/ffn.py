"""Feed-forward products of all experts, one launch per product, and their gradients.

Rows are worked on in *places*: the order in which pairs of a token and an expert stand when sorted by expert. A tile of
rows belongs to one expert, which it finds by scanning the experts' offsets; rows are gathered and scattered by the
loads and stores of the products themselves, so that no token is copied or padded. Nothing here depends on how many
tokens each expert got except through values on the device: a launch covers the worst case, and tiles beyond the last
expert return at once.

From a few hundred rows per expert on, the products sit at the limit of the matrix units, below at the bandwidth of the
weights, each of which is then read once.

Legend of shape suffixes: T tokens, K experts per token, N places, D hidden size, F FFN width, E experts, Q rows per
sorted item (1 unless whole groups of rows are routed), M x N tile of a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .combine import combine_forward
from .gate import INTERPRETED, TRITON_DTYPE
from .tuning import ProductConfig

MOST_SEPARATE = 32
"""Up to this many separate expert tensors are passed to a kernel one by one; more are stacked first."""


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, N, E, P, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts[e, program]: how many of the program's ids are e."""
    program = tl.program_id(0)
    n_N = program * BLOCK + tl.arange(0, BLOCK)
    e_E = tl.arange(0, BLOCK_E)
    id_N = tl.load(ids_ptr + n_N, mask=n_N < N, other=0)
    tl.device_assert((id_N >= 0) & (id_N < E), "moe_zero: expert index out of range")
    here_NE = (id_N[:, None] == e_E[None, :]) & (n_N < N)[:, None]
    tl.store(counts_ptr + e_E * P + program, tl.sum(here_NE.to(tl.int32), axis=0), mask=e_E < E)


@triton.jit
def _place_kernel(
    ids_ptr, counts_ptr, sums_ptr, order_ptr, offsets_ptr, N, E, P, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Write each id's index to its place; sums is the running sum of counts over [E, P]."""
    program = tl.program_id(0)
    n_N = program * BLOCK + tl.arange(0, BLOCK)
    e_E = tl.arange(0, BLOCK_E)
    id_N = tl.load(ids_ptr + n_N, mask=n_N < N, other=0)
    here_NE = (id_N[:, None] == e_E[None, :]) & (n_N < N)[:, None]
    slot_E = e_E * P + program
    begin_E = tl.load(sums_ptr + slot_E, mask=e_E < E, other=0) - tl.load(counts_ptr + slot_E, mask=e_E < E, other=0)
    if program == 0:
        tl.store(offsets_ptr + e_E, begin_E, mask=e_E < E)
        tl.store(offsets_ptr + E, N)
    rank_NE = tl.cumsum(here_NE.to(tl.int32), axis=0) - 1
    place_N = tl.sum(tl.where(here_NE, begin_E[None, :] + rank_NE, 0), axis=1)
    tl.store(order_ptr + place_N, n_N, mask=n_N < N)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable counting sort: the index at each place [N] and each expert's first place [E + 1], both int32."""
    ids = ids.reshape(-1).contiguous()
    N, device = ids.numel(), ids.device
    if N == 0:
        return torch.empty(0, dtype=torch.int32, device=device), torch.zeros(
            num_experts + 1, dtype=torch.int32, device=device
        )
    block_e = max(16, triton.next_power_of_2(num_experts))
    block = max(32, 8192 // block_e)
    programs = triton.cdiv(N, block)
    counts_EP = torch.empty(num_experts, programs, dtype=torch.int32, device=device)
    order_N = torch.empty(N, dtype=torch.int32, device=device)
    offsets_E = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    blocks = {"BLOCK": block, "BLOCK_E": block_e}
    with torch.cuda.device_of(ids):
        _count_kernel[(programs,)](ids, counts_EP, N, num_experts, programs, **blocks, debug=True)
        sums_EP = counts_EP.flatten().cumsum(0, dtype=torch.int32)
        _place_kernel[(programs,)](ids, counts_EP, sums_EP, order_N, offsets_E, N, num_experts, programs, **blocks)
    return order_N, offsets_E


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_and_slope(x, TANH: tl.constexpr):
    if TANH:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, slope
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _parameter(pointers, expert, stride_e, SEPARATE: tl.constexpr):
    """Pointer to an expert's parameter, of one stacked tensor or out of separate ones."""
    pointer = pointers[0]
    if SEPARATE > 1:
        for i in tl.static_range(1, SEPARATE):
            pointer = tl.where(expert == i, pointers[i], pointer)
        return tl.multiple_of(pointer, 16)
    return pointer + expert.to(tl.int64) * stride_e


@triton.jit
def _locate(
    tile, offsets_ptr, T, E, Q: tl.constexpr, DENSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Expert of a tile of rows (E if there is none), its first place and number of rows, and the tile's first row."""
    if DENSE:
        tiles = tl.cdiv(T, BLOCK_M)
        expert = tile // tiles
        return expert, expert * T, T, (tile - expert * tiles) * BLOCK_M
    else:
        e_E = tl.arange(0, BLOCK_E)
        begin_E = tl.load(offsets_ptr + e_E, mask=e_E < E, other=0) * Q
        end_E = tl.load(offsets_ptr + e_E + 1, mask=e_E < E, other=0) * Q
        tiles_E = tl.cdiv(end_E - begin_E, BLOCK_M)
        expert = tl.sum((tl.cumsum(tiles_E, axis=0) <= tile).to(tl.int32))
        tiles_before = tl.sum(tl.where(e_E < expert, tiles_E, 0))
        begin = tl.sum(tl.where(e_E == expert, begin_E, 0))
        rows = tl.sum(tl.where(e_E == expert, end_E - begin_E, 0))
        return expert, begin, rows, (tile - tiles_before) * BLOCK_M


@triton.jit
def _rows(m_M, in_M, begin, order_ptr, Q: tl.constexpr, K: tl.constexpr, DENSE: tl.constexpr):
    """Place, row of a pair, sorted item and row of a token, of rows ``m_M`` of the expert that starts at ``begin``."""
    place_M = begin + m_M
    if DENSE:
        return place_M, place_M, place_M, m_M
    else:
        item_M = tl.load(order_ptr + place_M // Q, mask=in_M, other=0)
        pair_M = item_M * Q + place_M % Q
        return place_M, pair_M, item_M, pair_M // K


@triton.jit(do_not_specialize=["T"])
def product_kernel(
    a_ptr,
    w_ptrs,
    bias_ptrs,
    out_ptr,
    act_ptr,  # [N, F]: GELU of the result, or weighted GELU of pre
    pre_ptr,  # [N, F]: read by the gelu_backward epilogue
    scale_ptr,  # one factor per sorted item
    dot_ptr,  # [E, F]: vector that each row's activations are multiplied with; unused by gelu_backward
    dots_ptr,  # [rows, tiles of columns]: the partial products
    order_ptr,
    offsets_ptr,
    T,
    E,
    columns,
    depth,
    stride_am,
    stride_ak,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    EPILOGUE: tl.constexpr,  # "affine", "gelu" or "gelu_backward"
    TANH: tl.constexpr,
    GATHER: tl.constexpr,  # rows of a are tokens, not places
    SCATTER: tl.constexpr,  # rows of out are pairs, not places
    DENSE: tl.constexpr,
    SEPARATE: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_DOT: tl.constexpr,
    STORE_OUT: tl.constexpr,
    STORE_ACT: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of BLOCK_K
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """rows @ w^T for every expert, with an epilogue:

    affine: out = scale * (product + bias).
    gelu: out = product + bias, act = gelu(out); dots = sum over the tile's columns of act * dot.
    gelu_backward: the product is the gradient of gelu(pre), before the token weight. out = the gradient of pre and
    act = gelu(pre), both times the token weight; dots = sum over the tile's columns of product * gelu(pre).
    """
    # Column tiles run fastest: the programs of a row tile share its rows, and those of an expert its weights, in L2.
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile_n = tl.program_id(0) % tiles_n
    expert, begin, rows, first = _locate(tl.program_id(0) // tiles_n, offsets_ptr, T, E, Q, DENSE, BLOCK_M, BLOCK_E)
    if expert < E:
        m_M = first + tl.arange(0, BLOCK_M)
        n_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k_K = tl.arange(0, BLOCK_K)
        in_M = m_M < rows
        in_N = n_N < columns
        place_M, pair_M, item_M, token_M = _rows(m_M, in_M, begin, order_ptr, Q, K, DENSE)
        row_M = token_M if GATHER else place_M

        w_ptr = _parameter(w_ptrs, expert, stride_we, SEPARATE)
        a_ptrs = a_ptr + row_M[:, None].to(tl.int64) * stride_am + k_K[None, :].to(tl.int64) * stride_ak
        b_ptrs = w_ptr + n_N[None, :].to(tl.int64) * stride_wn + k_K[:, None].to(tl.int64) * stride_wk
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, depth, BLOCK_K):
            if EVEN:
                a_MK = tl.load(a_ptrs, mask=in_M[:, None], other=0.0)
                b_KN = tl.load(b_ptrs, mask=in_N[None, :], other=0.0)
            else:
                in_K = start + k_K < depth
                a_MK = tl.load(a_ptrs, mask=in_M[:, None] & in_K[None, :], other=0.0)
                b_KN = tl.load(b_ptrs, mask=in_K[:, None] & in_N[None, :], other=0.0)
            acc_MN = tl.dot(a_MK.to(DOT_DTYPE), b_KN.to(DOT_DTYPE), acc_MN, input_precision=PRECISION)
            a_ptrs += BLOCK_K * stride_ak
            b_ptrs += BLOCK_K * stride_wk

        in_MN = in_M[:, None] & in_N[None, :]
        at_place_MN = place_M[:, None].to(tl.int64) * columns + n_N[None, :]
        if HAS_BIAS:
            bias_ptr = _parameter(bias_ptrs, expert, stride_be, SEPARATE)
            bias_N = tl.load(bias_ptr + n_N.to(tl.int64) * stride_bn, mask=in_N, other=0.0)
            acc_MN += bias_N.to(tl.float32)[None, :]

        if EPILOGUE == "gelu":
            if STORE_OUT:
                tl.store(out_ptr + at_place_MN, acc_MN, mask=in_MN)
            act_MN = _gelu(acc_MN, TANH)
            if STORE_ACT:
                tl.store(act_ptr + at_place_MN, act_MN, mask=in_MN)
            if HAS_DOT:
                dot_N = tl.load(dot_ptr + expert.to(tl.int64) * columns + n_N, mask=in_N, other=0.0)
                tl.store(
                    dots_ptr + place_M.to(tl.int64) * tiles_n + tile_n,
                    tl.sum(act_MN * dot_N[None, :], axis=1),
                    mask=in_M,
                )
        elif EPILOGUE == "gelu_backward":
            pre_MN = tl.load(pre_ptr + at_place_MN, mask=in_MN, other=0.0).to(tl.float32)
            act_MN, slope_MN = _gelu_and_slope(pre_MN, TANH)
            if HAS_DOT:
                tl.store(dots_ptr + pair_M.to(tl.int64) * tiles_n + tile_n, tl.sum(acc_MN * act_MN, axis=1), mask=in_M)
            if HAS_SCALE:
                scale_M = tl.load(scale_ptr + item_M, mask=in_M, other=0.0).to(tl.float32)
                slope_MN *= scale_M[:, None]
                act_MN *= scale_M[:, None]
            tl.store(out_ptr + at_place_MN, acc_MN * slope_MN, mask=in_MN)
            if STORE_ACT:
                tl.store(act_ptr + at_place_MN, act_MN, mask=in_MN)
        else:
            if HAS_SCALE:
                acc_MN *= tl.load(scale_ptr + item_M, mask=in_M, other=0.0).to(tl.float32)[:, None]
            out_row_M = pair_M if SCATTER else place_M
            tl.store(out_ptr + out_row_M[:, None].to(tl.int64) * columns + n_N[None, :], acc_MN, mask=in_MN)


@triton.jit(do_not_specialize=["T"])
def weight_gradient_kernel(
    a_ptr,
    b_ptr,
    out_ptr,  # [E, M, N]
    order_ptr,
    offsets_ptr,
    T,
    columns_m,
    columns_n,
    stride_ar,
    stride_am,
    stride_br,
    stride_bn,
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    DENSE: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a^T b over the rows of each expert. An expert without rows gets the zeros that its sum starts from."""
    tiles_n = tl.cdiv(columns_n, BLOCK_N)
    tiles_m = tl.cdiv(columns_m, BLOCK_M)
    tile = tl.program_id(0)
    expert = tile // (tiles_m * tiles_n)
    m_M = tile // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_N = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_M = m_M < columns_m
    in_N = n_N < columns_n
    if DENSE:
        begin = expert * T
        rows = T
    else:
        begin = tl.load(offsets_ptr + expert) * Q
        rows = tl.load(offsets_ptr + expert + 1) * Q - begin

    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rows, BLOCK_K):
        r_K = start + tl.arange(0, BLOCK_K)
        in_K = r_K < rows
        place_K, _, _, token_K = _rows(r_K, in_K, begin, order_ptr, Q, K, DENSE)
        a_row_K = token_K if GATHER_A else place_K
        b_row_K = token_K if GATHER_B else place_K
        a_offsets = m_M[:, None].to(tl.int64) * stride_am + a_row_K[None, :].to(tl.int64) * stride_ar
        b_offsets = b_row_K[:, None].to(tl.int64) * stride_br + n_N[None, :].to(tl.int64) * stride_bn
        a_MK = tl.load(a_ptr + a_offsets, mask=in_M[:, None] & in_K[None, :], other=0.0)
        b_KN = tl.load(b_ptr + b_offsets, mask=in_K[:, None] & in_N[None, :], other=0.0)
        acc_MN = tl.dot(a_MK.to(DOT_DTYPE), b_KN.to(DOT_DTYPE), acc_MN, input_precision=PRECISION)
    offsets = (expert.to(tl.int64) * columns_m + m_M[:, None]) * columns_n + n_N[None, :]
    tl.store(out_ptr + offsets, acc_MN, mask=in_M[:, None] & in_N[None, :])


@triton.jit(do_not_specialize=["T"])
def bias_gradient_kernel(
    a_ptr,
    scale_ptr,
    out_ptr,  # [E, columns]
    order_ptr,
    offsets_ptr,
    T,
    columns,
    stride_ar,
    stride_an,
    GATHER: tl.constexpr,
    DENSE: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum of a over the rows of each expert, times the token weight where there is one."""
    expert = tl.program_id(0)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_N = n_N < columns
    if DENSE:
        begin = expert * T
        rows = T
    else:
        begin = tl.load(offsets_ptr + expert) * Q
        rows = tl.load(offsets_ptr + expert + 1) * Q - begin
    acc_KN = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, rows, BLOCK_K):
        r_K = start + tl.arange(0, BLOCK_K)
        in_K = r_K < rows
        place_K, _, item_K, token_K = _rows(r_K, in_K, begin, order_ptr, Q, K, DENSE)
        row_K = token_K if GATHER else place_K
        offsets = row_K[:, None].to(tl.int64) * stride_ar + n_N[None, :].to(tl.int64) * stride_an
        a_KN = tl.load(a_ptr + offsets, mask=in_K[:, None] & in_N[None, :], other=0.0).to(tl.float32)
        if HAS_SCALE:
            a_KN *= tl.load(scale_ptr + item_K, mask=in_K, other=0.0).to(tl.float32)[:, None]
        acc_KN += a_KN
    tl.store(out_ptr + expert.to(tl.int64) * columns + n_N, tl.sum(acc_KN, axis=0), mask=in_N)


@triton.jit(do_not_specialize=["R"])
def post_route_gradient_kernel(
    pre_ptr,  # [E, R, F]
    grad_pre_ptr,  # [E, R, F]
    grad_logits_ptr,  # [G, E]
    folded_ptr,  # [E, F]
    out_ptr,  # [E, R, F]
    folded_partials_ptr,  # [P, E, F]
    R,
    E,
    F,
    Q: tl.constexpr,
    TANH: tl.constexpr,
    HAS_GRAD_PRE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of the pre-activations from that of the logits, plus what reached them otherwise; and that of folded."""
    expert = tl.program_id(2).to(tl.int64)
    m_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_M = m_M < R
    in_N = n_N < F
    in_MN = in_M[:, None] & in_N[None, :]
    offsets = (expert * R + m_M[:, None]) * F + n_N[None, :]
    grad_M = tl.load(grad_logits_ptr + (m_M // Q).to(tl.int64) * E + expert, mask=in_M, other=0.0) / Q
    folded_N = tl.load(folded_ptr + expert * F + n_N, mask=in_N, other=0.0)
    pre_MN = tl.load(pre_ptr + offsets, mask=in_MN, other=0.0).to(tl.float32)
    act_MN, slope_MN = _gelu_and_slope(pre_MN, TANH)
    grad_MN = grad_M[:, None] * folded_N[None, :] * slope_MN
    if HAS_GRAD_PRE:
        grad_MN += tl.load(grad_pre_ptr + offsets, mask=in_MN, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, grad_MN, mask=in_MN)
    partial_N = tl.sum(act_MN * grad_M[:, None], axis=0)
    tl.store(folded_partials_ptr + (tl.program_id(1) * E + expert) * F + n_N, partial_N, mask=in_N)


class _Rows:
    """How the rows of a product map to places, for all launches of one call."""

    def __init__(
        self, num_experts: int, rows: int, order: Tensor | None, offsets: Tensor | None, K: int = 1, Q: int = 1
    ):
        self.num_experts, self.K, self.Q = num_experts, K, Q
        self.dense = order is None
        self.order, self.offsets = order, offsets
        self.T = rows if self.dense else 0
        self.N = rows * num_experts if self.dense else rows
        self.block_e = max(16, triton.next_power_of_2(num_experts))

    @property
    def rows_per_expert(self) -> int:
        return self.T if self.dense else triton.cdiv(self.N, self.num_experts)

    def tiles(self, block_m: int) -> int:
        """How many tiles of rows there can be at most, wherever the rows lie."""
        if self.dense:
            return self.num_experts * triton.cdiv(self.T, block_m)
        return self.N // block_m + min(self.num_experts, self.N)

    @property
    def arguments(self) -> dict:
        return {"order_ptr": self.order, "offsets_ptr": self.offsets, "T": self.T}

    @property
    def constants(self) -> dict:
        return {"DENSE": self.dense, "Q": self.Q, "K": self.K}


def _product(
    rows: _Rows,
    a: Tensor,
    weights: Sequence[Tensor],
    *,
    transposed: bool = False,
    biases: Sequence[Tensor] = (),
    epilogue: str = "affine",
    tanh: bool = False,
    gather: bool = False,
    scatter: bool = False,
    scale: Tensor | None = None,
    pre: Tensor | None = None,
    dot: Tensor | None = None,
    wants_dots: bool = False,
    out: Tensor | None = None,
    act: Tensor | None = None,
    config: ProductConfig | None = None,
) -> Tensor | None:
    """Launch ``product_kernel``; ``transposed`` multiplies with w instead of w^T. Returns the row sums of the dots."""
    columns, depth = weights[0].shape[-2:]
    weights, biases = _parameter_arguments(weights, biases)
    stride_e, stride_n, stride_k = (0, *weights[0].stride())[-3:]
    if transposed:
        stride_n, stride_k, columns, depth = stride_k, stride_n, depth, columns
    bias_strides = (0, 0) if biases is None else (0, *biases[0].stride())[-2:]
    config = config or tuning.product_config(
        tuning.capability(a.device),
        a.dtype,
        rows.rows_per_expert,
        aligned=columns % 16 == 0 and depth % 16 == 0,
        two_results=epilogue == "gelu_backward",
    )
    tiles_n = triton.cdiv(columns, config.block_n)
    grid = (rows.tiles(config.block_m) * tiles_n,)
    dots = torch.empty(rows.N, tiles_n, dtype=torch.float32, device=a.device) if wants_dots else None
    if grid[0] > 0:
        with torch.cuda.device_of(a):
            product_kernel[grid](
                a,
                weights,
                biases,
                out,
                act,
                pre,
                scale,
                dot,
                dots,
                **rows.arguments,
                E=rows.num_experts,
                columns=columns,
                depth=depth,
                stride_am=a.stride(-2),
                stride_ak=a.stride(-1),
                stride_we=stride_e,
                stride_wn=stride_n,
                stride_wk=stride_k,
                stride_be=bias_strides[0],
                stride_bn=bias_strides[1],
                EPILOGUE=epilogue,
                TANH=tanh,
                GATHER=gather,
                SCATTER=scatter,
                **rows.constants,
                SEPARATE=len(weights),
                HAS_BIAS=biases is not None,
                HAS_SCALE=scale is not None,
                HAS_DOT=wants_dots,
                STORE_OUT=out is not None,
                STORE_ACT=act is not None,
                EVEN=depth % config.block_k == 0,
                **_numerics(a),
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=config.block_k,
                BLOCK_E=rows.block_e,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return None if dots is None else dots.sum(1)


def _parameter_arguments(
    weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Weights and biases as a kernel takes them: both one stacked tensor, or both a tensor per expert."""
    lists = [weights, biases] if biases else [weights]
    arguments = [tuple(tensors[0].unbind(0) if len(tensors) == 1 else tensors) for tensors in lists]
    if not (1 < len(weights) <= MOST_SEPARATE and all(_alike(tensors) for tensors in arguments)):
        arguments = [(_stack(tensors),) for tensors in lists]
    return arguments[0], arguments[1] if biases else None


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether one set of strides and the alignment that the kernels assume hold for all."""
    return all(t.stride() == tensors[0].stride() and (t.is_meta or t.data_ptr() % 16 == 0) for t in tensors)


def _numerics(a: Tensor) -> dict:
    """fp32 products: three TF32 products where they are known to add up exactly, plain cores elsewhere."""
    fp32 = a.dtype == torch.float32
    precision = "tf32x3" if fp32 and tuning.capability(a.device) < 100 else "ieee"
    return {"DOT_DTYPE": tl.float32 if INTERPRETED else TRITON_DTYPE[a.dtype], "PRECISION": precision}


def _weight_gradient(
    rows: _Rows, a: Tensor, b: Tensor, *, gather_a: bool, gather_b: bool, config: ProductConfig | None = None
) -> Tensor:
    M, N = a.shape[-1], b.shape[-1]
    config = config or tuning.weight_gradient_config(tuning.capability(a.device), a.dtype, rows.rows_per_expert)
    out = torch.empty(rows.num_experts, M, N, dtype=a.dtype, device=a.device)
    grid = (rows.num_experts * triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),)
    with torch.cuda.device_of(a):
        weight_gradient_kernel[grid](
            a,
            b,
            out,
            **rows.arguments,
            columns_m=M,
            columns_n=N,
            stride_ar=a.stride(-2),
            stride_am=a.stride(-1),
            stride_br=b.stride(-2),
            stride_bn=b.stride(-1),
            GATHER_A=gather_a,
            GATHER_B=gather_b,
            **rows.constants,
            **_numerics(a),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _bias_gradient(rows: _Rows, a: Tensor, *, gather: bool, scale: Tensor | None = None) -> Tensor:
    columns = a.shape[-1]
    out = torch.empty(rows.num_experts, columns, dtype=a.dtype, device=a.device)
    block_n, block_k = 64, 32
    with torch.cuda.device_of(a):
        bias_gradient_kernel[(rows.num_experts, triton.cdiv(columns, block_n))](
            a,
            scale,
            out,
            **rows.arguments,
            columns=columns,
            stride_ar=a.stride(-2),
            stride_an=a.stride(-1),
            GATHER=gather,
            **rows.constants,
            HAS_SCALE=scale is not None,
            BLOCK_K=block_k,
            BLOCK_N=block_n,
            num_warps=4,
        )
    return out


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def gelu_ffn_forward(x_TD, ids_TK, weights_TK, w1, b1, w2, b2, tanh: bool, save: bool, config=None):
    """The result, and pre-activations, order and offsets for the backward pass; see ``moe_zero.ops.gelu_ffn``."""
    (T, D), (F, _) = x_TD.shape, w1[0].shape[-2:]
    E = w1[0].shape[0] if len(w1) == 1 else len(w1)
    dense = ids_TK is None
    if dense:
        order, offsets = (torch.empty(0, dtype=torch.int32, device=x_TD.device) for _ in range(2))
        rows = _Rows(E, T, None, None)
    else:
        order, offsets = sort_by_expert(ids_TK, E)
        rows = _Rows(E, ids_TK.numel(), order, offsets, K=ids_TK.shape[1])
    pre_NF = _empty(x_TD, rows.N if save else 0, F)
    act_NF, y_ND = _empty(x_TD, rows.N, F), _empty(x_TD, rows.N, D)
    _product(
        rows,
        x_TD,
        w1,
        biases=b1,
        epilogue="gelu",
        tanh=tanh,
        gather=True,
        out=pre_NF if save else None,
        act=act_NF,
        config=config,
    )
    scale = None if weights_TK is None else weights_TK.reshape(-1).contiguous()
    _product(rows, act_NF, w2, biases=b2, scatter=True, scale=scale, out=y_ND, config=config)
    if dense:
        return y_ND.view(E, T, D), pre_NF, order, offsets
    return _sum_over_experts(y_ND.view(T, rows.K, D)), pre_NF, order, offsets


def _sum_over_experts(y_TKD: Tensor) -> Tensor:
    if y_TKD.shape[1] == 1:
        return y_TKD.squeeze(1)
    return combine_forward(y_TKD, None, None, None, None, 0.0, y_TKD.dtype)[0]


def gelu_ffn_backward(
    grad_y,
    x_TD,
    weights_TK,
    w1,
    b1,
    w2,
    b2,
    pre_NF,
    order,
    offsets,
    dense: bool,
    experts_per_token: int,
    tanh: bool,
    saved: bool,
    needs,
    config=None,
):
    """Gradients of x, weights, w1, b1, w2, b2, the last four stacked; empty where ``needs`` is false."""
    (T, D), (F, _) = x_TD.shape, w1[0].shape[-2:]
    E = w1[0].shape[0] if len(w1) == 1 else len(w1)
    rows = _Rows(E, T, None, None) if dense else _Rows(E, order.numel(), order, offsets, K=experts_per_token)
    needs_x, needs_weights, needs_w1, needs_b1, needs_w2, needs_b2 = needs
    none = x_TD.new_empty(0)
    grad_x, grad_weights, grad_w1, grad_b1, grad_w2, grad_b2 = (none,) * 6
    grad_y = (grad_y.reshape(-1, D) if dense else grad_y).contiguous()
    scale = None if weights_TK is None else weights_TK.reshape(-1).contiguous()
    # In the dense form each expert has a gradient of its own per row, so that its rows are places already.
    gather = not dense
    if needs_b2:
        grad_b2 = _bias_gradient(rows, grad_y, gather=gather, scale=scale)
    if needs_x or needs_weights or needs_w1 or needs_b1 or needs_w2:
        if not saved:
            pre_NF = _empty(x_TD, rows.N, F)
            _product(rows, x_TD, w1, biases=b1, epilogue="gelu", tanh=tanh, gather=True, out=pre_NF, config=config)
        grad_pre_NF = _empty(x_TD, rows.N, F)
        act_NF = _empty(x_TD, rows.N, F) if needs_w2 else None
        dots = _product(
            rows,
            grad_y,
            w2,
            transposed=True,
            epilogue="gelu_backward",
            tanh=tanh,
            gather=gather,
            scale=scale,
            pre=pre_NF,
            wants_dots=needs_weights,
            out=grad_pre_NF,
            act=act_NF,
            config=config,
        )
        if needs_weights:
            grad_weights = dots.view(weights_TK.shape)
            if b2:
                # <grad_y, b2> of each pair, by way of all experts: E is small beside F.
                of_all_TE = grad_y.float() @ _stack(b2).float().T
                pair_expert = _expert_of_pair(order, offsets).view(weights_TK.shape)
                grad_weights = grad_weights + of_all_TE.gather(1, pair_expert)
            grad_weights = grad_weights.to(weights_TK.dtype)
        if needs_w2:
            grad_w2 = _weight_gradient(rows, grad_y, act_NF, gather_a=gather, gather_b=False, config=config)
        if needs_w1:
            grad_w1 = _weight_gradient(rows, grad_pre_NF, x_TD, gather_a=False, gather_b=True, config=config)
        if needs_b1:
            grad_b1 = _bias_gradient(rows, grad_pre_NF, gather=False)
        if needs_x:
            grad_ND = _empty(x_TD, rows.N, D)
            _product(rows, grad_pre_NF, w1, transposed=True, scatter=True, out=grad_ND, config=config)
            grad_x = _sum_over_experts(grad_ND.view(E, T, D).transpose(0, 1) if dense else grad_ND.view(T, rows.K, D))
    return grad_x, grad_weights, grad_w1, grad_b1, grad_w2, grad_b2


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.stack(list(parameters))


def _expert_of_pair(order: Tensor, offsets: Tensor) -> Tensor:
    places = torch.arange(order.numel(), device=order.device, dtype=torch.int32)
    experts = torch.searchsorted(offsets[1:], places, right=True)
    return torch.empty_like(experts).scatter_(0, order.long(), experts)


def post_route_up(x_RD, Q: int, w1, b1, folded_EF, tanh: bool, config=None):
    """Logits [G, E] and pre-activations [E, R, F] of the dense first product; see ``moe_zero.ops.post_route``."""
    (R, _), (E, F) = x_RD.shape, folded_EF.shape
    rows = _Rows(E, R, None, None)
    pre_ERF = _empty(x_RD, E, R, F)
    dots = _product(
        rows,
        x_RD,
        w1,
        biases=b1,
        epilogue="gelu",
        tanh=tanh,
        gather=True,
        dot=folded_EF.contiguous(),
        wants_dots=True,
        out=pre_ERF,
        config=config,
    )
    return dots.view(E, R // Q, Q).mean(2).T.contiguous(), pre_ERF


def post_route_up_backward(
    grad_logits_GE, grad_pre_ERF, x_RD, Q: int, w1, folded_EF, pre_ERF, tanh: bool, needs, config=None
):
    """Gradients of x, w1, b1 (stacked) and folded; empty where ``needs`` is false."""
    (E, R, F), D = pre_ERF.shape, x_RD.shape[1]
    needs_x, needs_w1, needs_b1, needs_folded = needs
    rows = _Rows(E, R, None, None)
    grad_x, grad_w1, grad_b1 = (x_RD.new_empty(0) for _ in range(3))
    if grad_logits_GE is None:
        grad_ERF = grad_pre_ERF.contiguous()
        grad_folded = torch.zeros_like(folded_EF) if needs_folded else folded_EF.new_empty(0)
    else:
        block_m, block_n = 32, 128
        grad_ERF = torch.empty_like(pre_ERF)
        partials_PEF = torch.zeros(triton.cdiv(R, block_m), E, F, dtype=torch.float32, device=x_RD.device)
        if R > 0:
            with torch.cuda.device_of(x_RD):
                post_route_gradient_kernel[(triton.cdiv(F, block_n), triton.cdiv(R, block_m), E)](
                    pre_ERF,
                    None if grad_pre_ERF is None else grad_pre_ERF.contiguous(),
                    grad_logits_GE.contiguous(),
                    folded_EF.contiguous(),
                    grad_ERF,
                    partials_PEF,
                    R,
                    E,
                    F,
                    Q=Q,
                    TANH=tanh,
                    HAS_GRAD_PRE=grad_pre_ERF is not None,
                    BLOCK_M=block_m,
                    BLOCK_N=block_n,
                    num_warps=4,
                )
        grad_folded = partials_PEF.sum(0) if needs_folded else folded_EF.new_empty(0)
    grad_NF = grad_ERF.view(E * R, F)
    if needs_w1:
        grad_w1 = _weight_gradient(rows, grad_NF, x_RD, gather_a=False, gather_b=True, config=config)
    if needs_b1:
        grad_b1 = _bias_gradient(rows, grad_NF, gather=False)
    if needs_x:
        grad_ND = _empty(x_RD, E * R, D)
        _product(rows, grad_NF, w1, transposed=True, out=grad_ND, config=config)
        grad_x = _sum_over_experts(grad_ND.view(E, R, D).transpose(0, 1))
    return grad_x, grad_w1, grad_b1, grad_folded


def _chosen(pre_EGQF: Tensor, groups_S: Tensor, experts_S: Tensor) -> tuple[_Rows, Tensor, Tensor]:
    """Row map of the chosen pairs sorted by expert, which [E * G] row each sorted pair is, and its pre-activations."""
    E, G, Q, F = pre_EGQF.shape
    order, offsets = sort_by_expert(experts_S, E)
    rows = _Rows(E, experts_S.numel() * Q, order, offsets, Q=Q)
    source_S = (experts_S * G + groups_S).index_select(0, order)
    return rows, source_S, pre_EGQF.reshape(E * G, Q * F).index_select(0, source_S).view(-1, F)


def post_route_down(pre_EGQF, groups_S, experts_S, weights_S, w2, b2, tanh: bool, config=None):
    """Outputs [S, Q, D] of the chosen pairs; see ``moe_zero.ops.post_route``."""
    Q, D = pre_EGQF.shape[2], w2[0].shape[-2]
    weights_S = None if weights_S is None else weights_S.contiguous()
    rows, _, pre_NF = _chosen(pre_EGQF, groups_S, experts_S)
    act_NF = torch.nn.functional.gelu(pre_NF, approximate="tanh" if tanh else "none")
    y_ND = _empty(pre_EGQF, rows.N, D)
    _product(rows, act_NF, w2, biases=b2, scatter=True, scale=weights_S, out=y_ND, config=config)
    return y_ND.view(-1, Q, D)


def post_route_down_backward(
    grad_SQD, pre_EGQF, groups_S, experts_S, weights_S, w2, b2, tanh: bool, needs, config=None
):
    """Gradients of pre, weights, w2, b2 (stacked); empty where ``needs`` is false."""
    (E, G, Q, F), D, S = pre_EGQF.shape, w2[0].shape[-2], experts_S.numel()
    needs_pre, needs_weights, needs_w2, needs_b2 = needs
    grad_pre, grad_weights, grad_w2, grad_b2 = (pre_EGQF.new_empty(0) for _ in range(4))
    rows, source_S, pre_NF = _chosen(pre_EGQF, groups_S, experts_S)
    grad_y = grad_SQD.reshape(-1, D).contiguous()
    weights_S = None if weights_S is None else weights_S.contiguous()
    grad_pre_NF = _empty(pre_EGQF, rows.N, F)
    act_NF = _empty(pre_EGQF, rows.N, F) if needs_w2 else None
    dots = _product(
        rows,
        grad_y,
        w2,
        transposed=True,
        epilogue="gelu_backward",
        tanh=tanh,
        gather=True,
        scale=weights_S,
        pre=pre_NF,
        wants_dots=needs_weights,
        out=grad_pre_NF,
        act=act_NF,
        config=config,
    )
    if needs_weights:
        grad_weights = dots.view(S, Q).sum(1)
        if b2:
            b2_SD = _stack(b2).index_select(0, experts_S).float()
            grad_weights = grad_weights + (grad_SQD.sum(1, dtype=torch.float32) * b2_SD).sum(1)
        grad_weights = grad_weights.to(weights_S.dtype)
    if needs_w2:
        grad_w2 = _weight_gradient(rows, grad_y, act_NF, gather_a=True, gather_b=False, config=config)
    if needs_b2:
        grad_b2 = _bias_gradient(rows, grad_y, gather=True, scale=weights_S)
    if needs_pre:
        grad_pre = torch.zeros_like(pre_EGQF, memory_format=torch.contiguous_format)
        grad_pre.view(E * G, Q * F).index_add_(0, source_S, grad_pre_NF.view(-1, Q * F))
    return grad_pre, grad_weights, grad_w2, grad_b2
