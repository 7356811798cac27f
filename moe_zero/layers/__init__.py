"""Layers with experts: ``nn.Module`` classes that know nothing of processes."""

from moe_zero.layers.beam import BeamMoE, BeamState, importance_loss
from moe_zero.layers.ffn import GeluFeedForward

__all__ = ["BeamMoE", "BeamState", "GeluFeedForward", "importance_loss"]
