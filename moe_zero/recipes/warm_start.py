"""Starting a Q-Former from a BERT checkpoint: the real MiniLM weights, or any BERT of the same widths.

Embeddings, self-attention and text feed-forward are copied, the text feed-forward also into the queries' one and
every expert (upcycling: Komatsuzaki et al., arXiv 2212.05055). Cross-attention, queries and gates are new. With text
alone the result computes what the BERT computes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moe_zero.qformer import QFormerModel


@torch.no_grad()
def copy_bert(model: QFormerModel, file: str | Path) -> list[str]:
    """Copy a BERT's weights into ``model`` and return the names of the parameters that stay as they were.

    Args:
        file: safetensors with BERT's usual names, without prefix. Its vocabulary may be shorter than the model's: the
            rows beyond (``[DEC]``) start as the mean of all words. BERT's embedding of the first segment is added to
            the positions, since here every token is of it.

    Raises:
        ValueError: a weight is missing or of another shape than the model's; named, with both shapes.
    """
    with safe_open(str(file), framework="pt") as weights:
        source = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 (no dictionary)
    targets = dict(model.named_parameters())
    left = set(targets)

    def put(name: str, value: Tensor) -> None:
        if targets[name].shape != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(targets[name].shape)}, but {file} has {tuple(value.shape)} for it; "
                "a model that starts from these weights has their widths (or choose init random)"
            )
        targets[name].copy_(value)
        left.discard(name)

    try:
        words, positions = (source[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
        new_words = targets["embeddings.word_embeddings.weight"].shape[0] - words.shape[0]
        put("embeddings.word_embeddings.weight", torch.cat([words, words.mean(0, keepdim=True).expand(new_words, -1)]))
        put("embeddings.position_embeddings.weight", positions + source["embeddings.token_type_embeddings.weight"][0])
        for part in ("weight", "bias"):
            put(f"embeddings.LayerNorm.{part}", source[f"embeddings.LayerNorm.{part}"])
            for index in range(model.config.num_hidden_layers):
                layer = f"encoder.layer.{index}."
                for name in (
                    *(f"attention.self.{kind}.{part}" for kind in ("query", "key", "value")),
                    *(f"attention.output.{kind}.{part}" for kind in ("dense", "LayerNorm")),
                    f"intermediate.dense.{part}",
                    *(f"output.{kind}.{part}" for kind in ("dense", "LayerNorm")),
                ):
                    put(layer + name, source[layer + name])
                put(f"{layer}expert_ln.{part}", source[f"{layer}output.LayerNorm.{part}"])
                routed = index in model.config.routed_layers
                for expert in (f"experts.{e}." for e in range(model.config.num_experts)) if routed else ("",):
                    put(f"{layer}experts.{expert}dense1.{part}", source[f"{layer}intermediate.dense.{part}"])
                    put(f"{layer}experts.{expert}dense2.{part}", source[f"{layer}output.dense.{part}"])
    except KeyError as error:
        raise ValueError(
            f"{file} has no weight {error}; it must be a BERT of at least as many layers as the model"
        ) from None
    return sorted(left)
