"""The mixture-of-experts Q-Former: configuration, blocks and model."""

from moe_zero.layers.beam import BeamState, importance_loss
from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.layer import QFormerLayer
from moe_zero.qformer.model import QFormerModel, QFormerOutput

__all__ = ["BeamState", "QFormerConfig", "QFormerLayer", "QFormerModel", "QFormerOutput", "importance_loss"]
