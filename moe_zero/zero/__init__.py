"""ZeRO-3: parameters, gradients and optimizer states sharded over ranks (arXiv 1910.02054, stage 3)."""

from moe_zero.zero.checkpoint import PendingSave, load_checkpoint, save_checkpoint, save_checkpoint_async
from moe_zero.zero.collectives import RanksDisagree, Statistics, Traffic
from moe_zero.zero.flat_layer import FROZEN_PARAMS_IDX, TRAINING_PARAMS_IDX
from moe_zero.zero.generations import find_checkpoint
from moe_zero.zero.layer import Zero3Layer
from moe_zero.zero.model import ShardedModel, shard
from moe_zero.zero.safetensors import export_safetensors, load_safetensors
from moe_zero.zero.sequential import Zero3Sequential

__all__ = [
    "FROZEN_PARAMS_IDX",
    "TRAINING_PARAMS_IDX",
    "PendingSave",
    "RanksDisagree",
    "ShardedModel",
    "Statistics",
    "Traffic",
    "Zero3Layer",
    "Zero3Sequential",
    "export_safetensors",
    "find_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_checkpoint_async",
    "shard",
]
