"""Which pairs are trained on in which step: a function of the seed and the step number, and of nothing else.

There is no state to save or to keep in step between processes: resuming at step n is asking for step n, and each
process cuts its rows out of the same global batch.

Legend of shape suffixes: B pairs of this process, P image tokens, W image width, T text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_zero.recipes.crops import Crop
from moe_zero.recipes.data import Picture
from moe_zero.recipes.features import FeatureStore
from moe_zero.recipes.tokenizer import CaptionTokenizer


class Batch(NamedTuple):
    """One process's rows of a global batch, on the CPU; the arguments of `QFormerPretraining.forward`."""

    image_features: Tensor
    """[B, P, W], fp32."""
    input_ids: Tensor
    """[B, T]"""
    attention_mask: Tensor
    """[B, T]"""
    image_ids: Tensor
    """[B]: position of the picture in the data."""
    negative_draws: Tensor
    """[B, 2] in [0, 1)."""


class BatchSource:
    """Batches of a picture, one of its training crops and one of its training captions.

    Every picture comes once in an epoch, in an order drawn anew; epochs follow each other without a gap, so that a
    batch may hold the end of one and the start of the next.

    Args:
        pictures: those with training captions.
        crops: the training crops of each, whose features are in ``store``.
        batch_size: pairs of the global batch.
        seed: two sources with the same arguments give the same batches.
    """

    def __init__(
        self,
        pictures: Sequence[Picture],
        crops: Sequence[Sequence[Crop]],
        store: FeatureStore,
        tokenizer: CaptionTokenizer,
        batch_size: int,
        seed: int,
    ):
        self.pictures, self.crops, self.store = pictures, crops, store
        self.batch_size, self.seed = batch_size, seed
        captions = [caption for picture in pictures for caption in picture.train_captions]
        self._ids, self._mask = tokenizer(captions)
        counts = torch.tensor([len(picture.train_captions) for picture in pictures])
        self._caption_start = counts.cumsum(0) - counts
        self._caption_count = counts
        self._epoch: tuple[int, Tensor] | None = None

    def _order(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, torch.randperm(len(self.pictures), generator=_generator(self.seed, 0, epoch)))
        return self._epoch[1]

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Rows ``rank`` of ``world_size`` equal parts of the batch of ``step``."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        image_ids = torch.tensor(
            [self._order(place // len(self.pictures))[place % len(self.pictures)] for place in places]
        )
        draws = torch.rand(self.batch_size, 4, generator=_generator(self.seed, 1, step))
        per_rank = self.batch_size // world_size
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        image_ids, draws = image_ids[mine], draws[mine]
        features = []
        for picture, draw in zip(image_ids.tolist(), draws[:, 0].tolist(), strict=True):
            crops = self.crops[picture]
            features.append(self.store.read(self.pictures[picture], crops, int(draw * len(crops))))
        captions = self._caption_start[image_ids] + (draws[:, 1] * self._caption_count[image_ids]).long()
        return Batch(torch.stack(features).float(), self._ids[captions], self._mask[captions], image_ids, draws[:, 2:])


def _generator(seed: int, purpose: int, number: int) -> torch.Generator:
    """One stream of random numbers for each (seed, purpose, number); they differ in all bits after mixing."""
    mixed = (seed * 2 + purpose) * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9
    mixed &= (1 << 64) - 1
    mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB & ((1 << 63) - 1)
    return torch.Generator().manual_seed(mixed)
