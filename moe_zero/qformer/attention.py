"""BERT's attention block, over the sequence itself, over it and what came before, or over the tokens of an image.

Legend of shape suffixes: M rows of the batch, S positions, D hidden size, H heads, P image tokens, W image width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.qformer.config import QFormerConfig


class KeyValue(NamedTuple):
    """Keys and values of some positions, kept so that later positions can look at them."""

    key: Tensor
    """[M, H, S, D / H]"""
    value: Tensor
    """[M, H, S, D / H]"""

    def followed_by(self, later: KeyValue) -> KeyValue:
        """Those of these positions and of ``later`` ones."""
        return KeyValue(*(torch.cat(pair, dim=2) for pair in zip(self, later, strict=True)))


class AttentionProjections(nn.Module):
    """Query, key and value projections; their names are those of BERT checkpoints."""

    def __init__(self, config: QFormerConfig, key_width: int):
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(key_width, config.hidden_size)
        self.value = nn.Linear(key_width, config.hidden_size)


class ResidualOutput(nn.Module):
    """``LayerNorm(dropout(dense(x)) + residual)``: how every block of post-LayerNorm BERT ends."""

    def __init__(self, config: QFormerConfig, in_features: int):
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class QFormerAttention(nn.Module):
    """Multi-head attention with residual and LayerNorm.

    Args:
        config: the model's configuration.
        cross: attend to image tokens of ``config.encoder_width`` instead of to the sequence itself.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2; Devlin et al. (BERT), arXiv 1810.04805.
    """

    def __init__(self, config: QFormerConfig, *, cross: bool = False):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.self = AttentionProjections(config, config.encoder_width if cross else config.hidden_size)
        self.output = ResidualOutput(config, config.hidden_size)

    def key_value(self, source: Tensor) -> KeyValue:
        """Keys and values of [M, S, D], or of an image [G, P, W] in cross-attention."""
        return KeyValue(self._heads(self.self.key(source)), self._heads(self.self.value(source)))

    def forward(
        self,
        x_MSD: Tensor,
        mask: Tensor | None,
        image_GPW: Tensor | None = None,
        *,
        rows_per_image: int = 1,
        key_value: KeyValue | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x_MSD: [M, S, D].
            mask: additive, broadcastable to [M, 1, S, positions looked at], or with an image to [G, 1, 1, P]; ``None``
                keeps all.
            image_GPW: [G, P, W] for cross-attention.
            rows_per_image: M / G consecutive rows share an image. Its keys and values are projected once, and the rows'
                queries are laid side by side: nothing in cross-attention connects one query with another, so the
                result is that of a copy of the image for each row.
            key_value: what to look at, instead of ``x_MSD`` itself.
        """
        if image_GPW is None:
            grouped = x_MSD
            key_value = key_value or self.key_value(x_MSD)
        else:
            grouped = x_MSD.unflatten(0, (-1, rows_per_image)).flatten(1, 2)
            key_value = self.key_value(image_GPW)
        context = F.scaled_dot_product_attention(
            self._heads(self.self.query(grouped)),
            *key_value,
            attn_mask=mask,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return self.output(context.transpose(1, 2).reshape(x_MSD.shape), x_MSD)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
