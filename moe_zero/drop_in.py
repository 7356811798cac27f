"""The package's parts in models that people already have: one entrance for whole models and for their layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from moe_zero.layers.patch import PatchReport, patch_feed_forwards, unpatch_feed_forwards


def patch(
    model: nn.Module,
    *,
    classes: Sequence[type | str] = (),
    names: Sequence[str] = (),
    experts: int | None = None,
    top_k: int | None = None,
    **qformer_settings,
) -> PatchReport:
    """Put our parts in place of those of ``model``, in place.

    - A whole BLIP-2 or InstructBLIP of transformers, without ``classes`` and ``names``: our Q-Former in place of
      theirs, dense or with ``experts`` routed by beams; ``qformer_settings`` (``num_beams``, ``moe_layers``, ``equal``,
      ...) are those of :func:`moe_zero.qformer.replace.replace_qformer`. Its other parts stay as they are.
    - Anything else: :class:`~moe_zero.layers.GeluFeedForward` in place of its two-layer GELU feed-forwards, or, with
      ``experts``, :class:`~moe_zero.layers.TokenMoE`; see :func:`moe_zero.layers.patch_feed_forwards`.

    Returns:
        What was replaced, and what was left alone and why.

    Raises:
        ValueError: an argument that does not fit the model, naming it.
    """
    if _has_their_qformer(model) and not classes and not names:
        if top_k is not None:
            raise ValueError(f"top_k is {top_k}, but a Q-Former's experts are routed by beams: give num_beams")
        from moe_zero.qformer.replace import replace_qformer

        replace_qformer(model, num_experts=experts or 1, **qformer_settings)
        return PatchReport(["qformer"])
    if qformer_settings:
        raise ValueError(
            f"{', '.join(qformer_settings)} is of the Q-Former in a whole BLIP-2 or InstructBLIP model; this is a "
            f"{type(model).__name__}" + (" with classes or names given" if classes or names else "")
        )
    return patch_feed_forwards(
        model, classes=classes, names=names, experts=experts, top_k=1 if top_k is None else top_k
    )


def unpatch(model: nn.Module) -> list[str]:
    """Put back every feed-forward that :func:`patch` replaced; returns their names.

    Raises:
        ValueError: for a whole model whose Q-Former was replaced: load it again.
    """
    replace = sys.modules.get("moe_zero.qformer.replace")
    if replace is not None and isinstance(getattr(model, "qformer", None), replace.ReplacedQFormer):
        raise ValueError(f"the Q-Former of this {type(model).__name__} cannot be put back; load the model again")
    return unpatch_feed_forwards(model)


def _has_their_qformer(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # a model of theirs cannot be there before their library
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    return isinstance(getattr(model, "qformer", None), nn.Module)
