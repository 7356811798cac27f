"""Layers with experts: ``nn.Module`` classes that know nothing of processes."""

from moe_zero.layers.beam import BeamMoE, BeamState, importance_loss
from moe_zero.layers.experts import Experts
from moe_zero.layers.ffn import GeluFeedForward
from moe_zero.layers.patch import PatchReport, patch_feed_forwards, unpatch_feed_forwards
from moe_zero.layers.token import TokenMoE, balancing_loss

__all__ = [
    "BeamMoE",
    "BeamState",
    "Experts",
    "GeluFeedForward",
    "PatchReport",
    "TokenMoE",
    "balancing_loss",
    "importance_loss",
    "patch_feed_forwards",
    "unpatch_feed_forwards",
]
