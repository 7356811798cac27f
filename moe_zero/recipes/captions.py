"""Captions of unseen crops, and whether they name what is in the picture.

A caption names a picture's object if one of the words accepted for that picture stands in it. What the same captions
would reach if each were put under a picture drawn at random is the chance level beside it.

Legend of shape suffixes: I crops, T word pieces.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_zero.recipes.processes import Processes
from moe_zero.recipes.retrieval import divided
from moe_zero.recipes.tokenizer import CaptionTokenizer

PAD = 0
BATCH = 64
"""Crops that one process captions at once. Every word gathers a sharded model's weights anew, so few large batches."""


def check_available() -> None:
    """Raise an ImportError that says what to do where captions can't be written."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "captions (objective lm) are written with transformers, which is not installed: "
            "pip install 'moe-zero[train]', or train without them: --objectives itc,itm"
        )


def names_one_of(caption: str, accepted: Sequence[str]) -> bool:
    """Whether one of the words (or phrases) stands in a caption, whole and in any case."""
    return any(re.search(rf"\b{re.escape(word)}\b", caption, re.IGNORECASE) for word in accepted)


@dataclass(frozen=True)
class PictureCaptions:
    """What was written about one picture."""

    name: str
    captions: tuple[str, ...]
    """Of each of its crops."""
    accepted: tuple[str, ...]
    """Words that name its object; none where the data don't say."""

    @property
    def right(self) -> int:
        """Captions that name the object."""
        return sum(names_one_of(caption, self.accepted) for caption in self.captions)

    @property
    def is_named(self) -> bool:
        """Whether more than half of the captions name it."""
        return 2 * self.right > len(self.captions)

    @property
    def usual(self) -> str:
        """The caption that the most crops got."""
        return Counter(self.captions).most_common(1)[0][0]


@dataclass(frozen=True)
class CaptionEvaluation:
    """The captions of all crops for evaluation."""

    pictures: tuple[PictureCaptions, ...]

    def figures(self) -> dict:
        """Accuracies, where the data name objects, and all captions, as plain values.

        ``object_accuracy``: share of the pictures of which more than half of the captions name the object;
        ``caption_accuracy``: share of the captions that do; ``chance``: what ``caption_accuracy`` is expected to be
        with each caption under a picture drawn at random.
        """
        judged = [picture for picture in self.pictures if picture.accepted]
        found: dict = {}
        if judged:
            captions = [caption for picture in judged for caption in picture.captions]
            hits = sum(names_one_of(caption, picture.accepted) for caption in captions for picture in judged)
            found = {
                "object_accuracy": sum(picture.is_named for picture in judged) / len(judged),
                "caption_accuracy": sum(picture.right for picture in judged) / len(captions),
                "chance": hits / (len(captions) * len(judged)),
                "judged_pictures": len(judged),
            }
        found["pictures"] = [
            {
                "picture": picture.name,
                "usual": picture.usual,
                "captions": list(picture.captions),
                "accepted": list(picture.accepted),
                "named": picture.right if picture.accepted else None,
            }
            for picture in self.pictures
        ]
        return found


@torch.no_grad()
def caption_crops(
    model: nn.Module, image: Callable[[int], Tensor], count: int, tokenizer: CaptionTokenizer, processes: Processes
) -> list[str]:
    """A caption of each crop, written greedily, the work divided over the processes; every process gets all.

    Args:
        model: a `QFormerPretraining` with ``"lm"`` among its objectives, or a sharded one.
        image: crop number to its features [P, W], fp32.
        count: crops are 0 to ``count``.
    """
    from moe_zero.qformer.captioning import CaptionOptions, write_captions

    options = CaptionOptions(max_words=tokenizer.max_tokens)

    def write(numbers: list[int]) -> Tensor:
        features = torch.stack([image(number) for number in numbers]).to(processes.device)
        written = write_captions(
            model,
            features,
            options,
            start_id=tokenizer.dec_id,
            end_id=tokenizer.sep_id,
            vocab_size=len(tokenizer),
            all_ranks=processes.world_size > 1,
        )
        ids_BT = torch.full((len(numbers), options.max_words), PAD, device=processes.device)
        for row, (ids,) in enumerate(written):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        return ids_BT

    return [tokenizer.text(ids) for ids in divided(write, count, processes, BATCH).long().tolist()]
