"""Layers with experts: ``nn.Module`` classes that know nothing of processes."""

from moe_zero.layers.beam import BeamMoE, BeamState, importance_loss
from moe_zero.layers.ffn import GeluFeedForward
from moe_zero.layers.patch import PatchReport, patch, unpatch

__all__ = ["BeamMoE", "BeamState", "GeluFeedForward", "PatchReport", "importance_loss", "patch", "unpatch"]
