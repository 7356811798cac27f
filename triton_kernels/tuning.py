"""Tile shapes of every kernel, chosen by problem size and compute capability.

One table, looked up at launch: nothing is tuned while a program runs, so a kernel compiles once per row of the table
that a program uses, whatever its token counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class GateConfig:
    """Tile of the gate kernels: tokens x experts x hidden. ``block_q`` rows are read at once when pooling."""

    block_t: int
    block_e: int
    block_d: int
    block_q: int
    num_warps: int
    num_stages: int


# Tokens per tile, hidden columns per tile, warps, stages, by the padded number of experts. A tile carries an int64 sort
# key for each logit, so that the registers of a thread bound tokens x experts; fp32 products run on the plain cores,
# fully unrolled, which bounds the columns too.
_GATE_FEW_TOKENS = {
    16: (16, 128, 4, 4),
    32: (16, 128, 4, 4),
    64: (16, 64, 4, 3),
    128: (16, 64, 4, 3),
    256: (16, 64, 8, 3),
}
_GATE_MANY_TOKENS = {
    16: (64, 64, 4, 4),
    32: (64, 64, 4, 4),
    64: (64, 64, 8, 3),
    128: (16, 64, 4, 3),
    256: (16, 64, 8, 3),
}
_GATE_FP32 = {16: (16, 64, 4, 3), 32: (16, 64, 4, 3), 64: (16, 32, 4, 3), 128: (16, 64, 8, 2), 256: (16, 32, 8, 2)}
GATE_MANY_TOKENS = 8192


def gate_config(num_tokens: int, num_experts: int, *, rows: int, fp32: bool) -> GateConfig:
    """The gate's tile. ``rows`` is how many rows are averaged per token; 1 for token routing."""
    block_e = max(16, _power_of_2(num_experts))
    if rows > 1:
        # One token per program, as there are few: the columns shrink with E to keep block_e x block_d in registers.
        return GateConfig(
            1, block_e, min(128, max(16, 1024 // block_e)), min(32, _power_of_2(rows)), 8 if block_e == 256 else 4, 2
        )
    table = _GATE_MANY_TOKENS if num_tokens >= GATE_MANY_TOKENS else _GATE_FEW_TOKENS
    if fp32:
        table = _GATE_FP32
    block_t, block_d, num_warps, num_stages = table[block_e]
    return GateConfig(block_t, block_e, block_d, 1, num_warps, num_stages)


@dataclass(frozen=True)
class ProductConfig:
    """Tile of a matrix product: rows x columns x depth."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The fewer rows per expert, the smaller the row tile, until only the weights' bytes count. The 99 KiB of shared memory
# of 12.0 hold fewer stages of the large tiles. In the gradients of weights the depth is the rows, whose indices are
# fetched a step before the rows: of num_stages, two go to that.
# --- Written by tune.py: tiles by capability and by rows per expert, up to the first number.
PRODUCTS = {
    80: (
        (16, ProductConfig(16, 64, 128, 4, 4)),
        (32, ProductConfig(32, 64, 128, 4, 3)),
        (128, ProductConfig(64, 64, 64, 4, 4)),
        (512, ProductConfig(64, 128, 64, 4, 3)),
        (None, ProductConfig(128, 128, 64, 8, 3)),
    ),
    90: (
        (16, ProductConfig(16, 64, 128, 4, 4)),
        (32, ProductConfig(32, 64, 128, 4, 4)),
        (128, ProductConfig(64, 64, 64, 4, 4)),
        (512, ProductConfig(64, 128, 64, 4, 4)),
        (None, ProductConfig(128, 128, 64, 8, 4)),
    ),
    100: (
        (16, ProductConfig(16, 64, 128, 4, 4)),
        (32, ProductConfig(32, 64, 128, 4, 4)),
        (128, ProductConfig(64, 64, 64, 4, 4)),
        (512, ProductConfig(64, 128, 64, 4, 4)),
        (None, ProductConfig(128, 128, 64, 8, 4)),
    ),
    120: (
        (16, ProductConfig(16, 64, 128, 4, 3)),
        (32, ProductConfig(32, 64, 64, 4, 4)),
        (128, ProductConfig(64, 64, 64, 4, 3)),
        (512, ProductConfig(64, 128, 64, 4, 3)),
        (None, ProductConfig(128, 128, 32, 8, 3)),
    ),
}
WEIGHT_GRADIENTS = {
    80: (
        (64, ProductConfig(64, 64, 32, 4, 5)),
        (None, ProductConfig(128, 128, 32, 8, 5)),
    ),
    90: (
        (64, ProductConfig(64, 64, 32, 4, 5)),
        (None, ProductConfig(128, 128, 64, 8, 5)),
    ),
    100: (
        (64, ProductConfig(64, 64, 32, 4, 5)),
        (None, ProductConfig(128, 128, 64, 8, 5)),
    ),
    120: (
        (64, ProductConfig(64, 64, 32, 4, 5)),
        (None, ProductConfig(128, 64, 32, 8, 5)),
    ),
}
# --- End of what tune.py writes.

_FP32_PRODUCTS = ((32, ProductConfig(16, 64, 32, 4, 3)), (None, ProductConfig(64, 64, 16, 8, 3)))
_FP32_WEIGHT_GRADIENTS = ((None, ProductConfig(64, 64, 16, 8, 5)),)

# Rows that are no multiple of 16 bytes are loaded element by element, which takes a 64-bit address for each.
_UNALIGNED_PRODUCTS = ((32, ProductConfig(16, 64, 32, 4, 2)), (None, ProductConfig(64, 64, 32, 8, 2)))


def product_config(
    capability: int, dtype: torch.dtype, rows_per_expert: int, *, aligned: bool, two_results: bool
) -> ProductConfig:
    """Tile of a product of the experts' rows with their weights.

    ``aligned`` is whether widths are multiples of 16, ``two_results`` whether GELU and its slope are needed at once.
    """
    table = _FP32_PRODUCTS if dtype == torch.float32 else PRODUCTS[_nearest(capability)]
    config = _lookup(table if aligned else _UNALIGNED_PRODUCTS, rows_per_expert)
    return replace(config, block_n=64) if two_results else config


def weight_gradient_config(capability: int, dtype: torch.dtype, rows_per_expert: int) -> ProductConfig:
    """Tile of a product over the experts' rows, whose depth is the rows."""
    table = _FP32_WEIGHT_GRADIENTS if dtype == torch.float32 else WEIGHT_GRADIENTS[_nearest(capability)]
    return _lookup(table, rows_per_expert)


def _nearest(capability: int) -> int:
    """Row of a table for a capability: its own generation's, but for 8.6 and 8.9, of little shared memory, 12.0's."""
    if capability < 90:
        return 80 if capability == 80 else 120
    return 90 if capability < 100 else 100 if capability < 120 else 120


def _lookup(table: tuple, rows: int) -> ProductConfig:
    return next(config for limit, config in table if limit is None or rows <= limit)


@dataclass(frozen=True)
class CombineConfig:
    """Tile of the combine kernels: whole rows."""

    block_t: int
    block_d: int
    num_warps: int


def combine_config(hidden_size: int, num_tokens: int) -> CombineConfig:
    """Up to 2048 elements per program, or one row; a row of 8192 takes 16 warps."""
    block_d = max(16, _power_of_2(hidden_size))
    block_t = max(1, 2048 // block_d) if num_tokens >= 1024 else 1
    return CombineConfig(block_t, block_d, min(16, max(1, block_t * block_d // 256)))


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def capability(device: torch.device) -> int:
    """Compute capability of a device as one number, 90 for 9.0; 80 where there is no GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
