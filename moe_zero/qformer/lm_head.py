"""From rows of text to scores of the next word: BERT's prediction head, with BERT's names.

Legend of shape suffixes: D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.qformer.config import QFormerConfig


class PredictionTransform(nn.Module):
    """``LayerNorm(gelu(dense(x)))``."""

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(x)))


class Predictions(nn.Module):
    """A transform, and a product with the word embeddings, which the head shares: it has no weights of its own there,
    and ``decoder.weight`` of published checkpoints is their copy."""

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.transform = PredictionTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))


class LanguageModelHead(nn.Module):
    """Scores of every word.

    Args:
        config: the model's configuration.

    State dict: ``predictions.transform.{dense,LayerNorm}.{weight,bias}``, ``predictions.bias`` [V].

    Source: Devlin et al. (BERT), arXiv 1810.04805; Press and Wolf, arXiv 1608.05859 (shared embeddings).
    """

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.predictions = Predictions(config)

    def forward(self, x: Tensor, words_VD: Tensor) -> Tensor:
        """Logits [..., V] of rows [..., D]."""
        return F.linear(self.predictions.transform(x), words_VD, self.predictions.bias)
