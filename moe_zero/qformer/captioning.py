"""Captions of pictures, chosen word by word with transformers' generation: greedy, beams, sampling.

The queries look at a picture once; each step then runs the new words alone, on keys and values kept from before.

Legend of shape suffixes: B pictures, N texts of each that are written at once (beams, or captions), M = B * N, T words,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

try:
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    hint = "writing captions needs transformers: pip install 'moe-zero[hf]'"
    raise ModuleNotFoundError(hint, name=error.name) from error

from moe_zero.qformer.cache import QFormerCache

PADDING_ID = 0


@dataclass(frozen=True)
class CaptionOptions:
    """How captions are chosen.

    Raises:
        ValueError: from the constructor, naming the field, its value and what would be right.
    """

    num_captions: int = 1
    """Captions of a picture."""
    beams: int = 1
    """Texts that are followed at once; 1 takes the best word each time. Not to be confused with beams of experts."""
    sample: bool = False
    """Draw words at random, by their probabilities."""
    temperature: float = 1.0
    """Of sampling: below 1 likely words become likelier."""
    top_p: float = 0.9
    """Sampling draws among the likeliest words that together have this probability."""
    max_words: int = 30
    """Word pieces at most."""
    no_repeat: int = 3
    """So many word pieces in a row are not written twice in a caption; 0 allows it."""

    def __post_init__(self) -> None:
        for name in ("num_captions", "beams", "max_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.no_repeat < 0:
            raise ValueError(f"no_repeat is {self.no_repeat}; it must be at least 0")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be greater than 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be greater than 0 and at most 1")
        if self.num_captions > 1 and not self.sample and self.beams < self.num_captions:
            raise ValueError(
                f"num_captions is {self.num_captions}, but without sample there is one caption for each beam, and "
                f"beams is {self.beams}; it must be at least {self.num_captions}"
            )


@torch.no_grad()
def write_captions(
    model: nn.Module,
    image_features: Tensor,
    options: CaptionOptions | None = None,
    *,
    start_id: int,
    end_id: int,
    vocab_size: int,
    max_positions: int = 512,
    all_ranks: bool = False,
) -> list[list[list[int]]]:
    """Write captions.

    Args:
        model: a `QFormerPretraining` with ``"lm"`` among its objectives, or a sharded one.
        image_features: [B, P, W], raw image tokens.
        options: how; by default one caption, greedily.
        start_id, end_id: the tokens that captions begin and end with.
        vocab_size, max_positions: the Q-Former's.
        all_ranks: every rank of the default process group calls this, with pictures of its own: go on until the last
            one has finished, as a sharded model needs, which gathers its weights from all.

    Returns:
        For each picture its captions, best first where there are beams, as token numbers without start and end.
    """
    options = options or CaptionOptions()
    writer = _Writer(model, vocab_size, image_features.device)
    texts = max(options.beams, options.num_captions)
    seen = model(image_features=image_features, task="look").repeat_interleave(texts)
    settings = GenerationConfig(
        bos_token_id=start_id,
        eos_token_id=end_id,
        pad_token_id=PADDING_ID,
        use_cache=False,  # transformers' own: `_Reading` is ours
        max_new_tokens=min(options.max_words, max_positions - 1),
        num_beams=options.beams,
        num_return_sequences=options.num_captions,
        do_sample=options.sample,
        no_repeat_ngram_size=options.no_repeat,
        **({"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if options.sample else {}),
    )
    start_B1 = torch.full((len(image_features), 1), start_id, device=image_features.device)
    ids_MT = writer.generate(
        start_B1,
        attention_mask=torch.ones_like(start_B1),
        generation_config=settings,
        reading=_Reading(seen, start_B1.new_empty(len(image_features) * texts, 0), texts),
        synced_gpus=all_ranks,
    )
    captions = [_until(end_id, ids[1:]) for ids in ids_MT.tolist()]
    return [captions[first : first + options.num_captions] for first in range(0, len(captions), options.num_captions)]


@dataclass
class _Reading:
    """What has been read of M texts, N of each picture, and what the model keeps of it.

    What it keeps is a function of picture and words. So when beam search goes on with other texts than before, each
    row's state is that of whichever row of the same picture has read the same words: this needs no word from
    transformers, which has called its caches by several names.
    """

    cache: QFormerCache
    ids_MT: Tensor
    texts_per_picture: int

    def next_words(self, ids_MT: Tensor, model: Callable) -> Tensor:
        """Scores [M, 1, V] of the words after ``ids_MT``, of which all but the last were read before.

        Where no word is new, this rank has finished and others have not: the model, which gathers its weights from all
        ranks, is called all the same.
        """
        read = self.ids_MT.shape[1]
        if read == ids_MT.shape[1]:
            return model(input_ids=ids_MT[:, -1:], cache=self.cache, task="read").logits
        if not torch.equal(ids_MT[:, :read], self.ids_MT):
            self.cache = self.cache.select(self._rows_that_read(ids_MT[:, :read]))
        logits_MTV, self.cache = model(input_ids=ids_MT[:, read:], cache=self.cache, task="read")
        self.ids_MT = ids_MT
        return logits_MTV[:, -1:]

    def _rows_that_read(self, ids_MT: Tensor) -> Tensor:
        """For each row of ``ids_MT`` the row here with the same words and picture: int64 [M]."""
        theirs_BNT, mine_BNT = (ids.unflatten(0, (-1, self.texts_per_picture)) for ids in (ids_MT, self.ids_MT))
        same_BNN = (theirs_BNT[:, :, None] == mine_BNT[:, None]).all(-1)
        # A text that is over is carried along with any words: it finds no row, takes the first, and nobody looks at it.
        first_B1 = torch.arange(len(same_BNN), device=ids_MT.device)[:, None] * self.texts_per_picture
        return (same_BNN.int().argmax(-1) + first_B1).flatten()


class _Writer(PreTrainedModel, GenerationMixin):
    """What `generate` asks of a model."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, model: nn.Module, vocab_size: int, device: torch.device):
        super().__init__(PretrainedConfig(vocab_size=vocab_size, is_encoder_decoder=False))
        self._place = device
        self._model = (model,)  # in a tuple, so that it does not become a part: a sharded model can't be moved or cast

    @property
    def device(self) -> torch.device:
        return self._place

    def can_generate(self) -> bool:
        return True

    def prepare_inputs_for_generation(self, input_ids: Tensor, reading: _Reading, attention_mask=None, **_) -> dict:
        return {"input_ids": input_ids, "reading": reading}

    def forward(self, input_ids: Tensor, reading: _Reading, **_) -> CausalLMOutput:
        return CausalLMOutput(logits=reading.next_words(input_ids, self._model[0]))


def _until(end_id: int, ids: list[int]) -> list[int]:
    return ids[: ids.index(end_id)] if end_id in ids else ids
