"""Operators: one module each, with the public function, its registration with PyTorch and its eager definition."""

from moe_zero.ops.flat import FlatPlan, pack, unpack
from moe_zero.ops.gate import GateOutput, gate
from moe_zero.ops.gelu_ffn import gelu_ffn, gelu_ffn_dense

__all__ = ["FlatPlan", "GateOutput", "gate", "gelu_ffn", "gelu_ffn_dense", "pack", "unpack"]
