"""What text needs of an earlier pass over the queries, and of earlier text, to go on from there.

Legend of shape suffixes: B samples, Q queries, T new tokens, S positions seen, the new ones included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_zero.qformer.layer import LayerCache


@dataclass(frozen=True)
class QFormerCache:
    """Keys and values of every block, beams of the queries included. It carries gradients to what it was made from."""

    layers: tuple[LayerCache, ...]
    batch: int
    """B"""
    num_queries: int
    """Q: the positions in front."""
    num_tokens: int = 0
    """Text tokens behind them."""

    @property
    def length(self) -> int:
        return self.num_queries + self.num_tokens

    def select(self, samples: Tensor) -> QFormerCache:
        """The cache of some samples, int64 [B'], in that order; a sample may come several times."""
        layers = tuple(layer.select(samples, self.batch) for layer in self.layers)
        return QFormerCache(layers, len(samples), self.num_queries, self.num_tokens)

    def repeat_interleave(self, times: int) -> QFormerCache:
        """Every sample so many times, next to each other."""
        device = self.layers[0].seen.key.device
        return self.select(torch.arange(self.batch, device=device).repeat_interleave(times))


def causal_keep(keep_BS: Tensor, num_queries: int, num_looking: int) -> Tensor:
    """Who may look at whom where text is read word by word: queries at queries, text at queries and at text up to
    itself.

    Args:
        keep_BS: [B, S], 0 at padding, of all positions: the queries, then text.
        num_queries: Q.
        num_looking: how many of the last positions look; the others have looked before.

    Returns:
        [B, num_looking, S], bool: first who looks.

    Source: Li et al., BLIP-2, arXiv 2301.12597, section 3.1 (image-grounded text generation); Dong et al. (UniLM),
    arXiv 1905.03197.
    """
    place = torch.arange(keep_BS.shape[1], device=keep_BS.device)
    looking = place[keep_BS.shape[1] - num_looking :, None]
    visible = (place < num_queries) | ((place <= looking) & (looking >= num_queries))
    return visible & (keep_BS != 0)[:, None]
