"""The mixture-of-experts Q-Former: configuration, blocks and model."""

from moe_zero.layers.beam import BeamState, importance_loss
from moe_zero.qformer.cache import QFormerCache
from moe_zero.qformer.checkpoint import ConversionReport, load_qformer, save_qformer
from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.layer import QFormerLayer
from moe_zero.qformer.model import QFormerModel, QFormerOutput
from moe_zero.qformer.upcycling import upcycle

__all__ = [
    "BeamState",
    "ConversionReport",
    "QFormerCache",
    "QFormerConfig",
    "QFormerLayer",
    "QFormerModel",
    "QFormerOutput",
    "importance_loss",
    "load_qformer",
    "save_qformer",
    "upcycle",
]
