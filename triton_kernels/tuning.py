"""Tile shapes of every kernel, chosen by problem size and compute capability.

One table, looked up at launch: nothing is tuned while a program runs, so a kernel compiles once per row of the table
that a program uses, whatever its token counts.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def capability(device: torch.device) -> int:
    """Compute capability of a device as one number, 90 for 9.0; 80 where there is no GPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
