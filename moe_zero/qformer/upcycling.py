"""A dense Q-Former made into a mixture of experts: every expert starts as a copy of the query feed-forward.

Source: Komatsuzaki et al., "Sparse Upcycling", arXiv 2212.05055.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_zero.qformer.model import QFormerModel


@torch.no_grad()
def upcycle(
    model: QFormerModel,
    *,
    num_experts: int = 3,
    num_beams: int = 3,
    moe_layers: Sequence[int] | None = None,
    equal: bool = False,
    **settings,
) -> QFormerModel:
    """A mixture that starts from the dense ``model``, which stays as it is.

    Args:
        model: dense.
        num_experts: E, the universal expert included.
        num_beams: N, the universal beam included.
        moe_layers: the layers that route; by default the upper half.
        equal: compute the same function as ``model`` at the start (without dropout). The published way of routing
            does not: it multiplies a routed output by its probability, and ends with the sum of two beams. With
            ``equal``, the weights are ``"scaled_prob"``, R * p, which is 1 between equal experts and still has a
            gradient to the gate, and the beams end in their ``"mean"``.
        settings: further settings of :class:`~moe_zero.qformer.QFormerConfig` that leave the widths as they are, such
            as ``weight_type`` or ``residual_from``.

    Gates are newly initialised, with ``equal`` at zero, where they prefer no expert. The result has the dtype, device
    and mode of ``model``, and what is frozen there is frozen in it.

    Raises:
        ValueError: the model routes already, or a setting is wrong.
    """
    if model.config.routed_layers:
        raise ValueError(
            f"the model has experts in layers {list(model.config.routed_layers)}; only a dense one can get them"
        )
    if num_experts < 2:
        raise ValueError(f"num_experts is {num_experts}; a mixture has at least 2 (one routed, one universal)")
    if moe_layers is None:
        moe_layers = range(model.config.num_hidden_layers // 2, model.config.num_hidden_layers)
    if equal:
        settings = {"weight_type": "scaled_prob", "merge": "mean", **settings}
    config = replace(
        model.config, num_experts=num_experts, num_beams=num_beams, moe_layers=tuple(moe_layers), **settings
    )
    if not config.routed_layers:
        raise ValueError("moe_layers is empty; name the layers that are to route")
    if equal and (not config.beam_layers or config.weight_type == "ffn_prob" or config.merge == "sum"):
        raise ValueError(
            f"a mixture with routing {config.routing!r}, weight_type {config.weight_type!r}, merge {config.merge!r} "
            "is not equal to the dense model; with routing by beams, 'scaled_prob' or 'one_hot', and 'mean' it is"
        )
    dense = dict(model.named_parameters())
    like = dense["encoder.layer.0.attention.self.query.weight"]
    with torch.device("meta"):
        mixture = QFormerModel(config)
    started = {}
    for name, parameter in mixture.named_parameters():
        # Every expert's "...experts.experts.2.dense1.weight" starts from the layer's "...experts.dense1.weight".
        source = dense.get(re.sub(r"\.experts\.experts\.\d+\.", ".experts.", name))
        if source is not None:
            started[name] = source.clone()
            parameter.requires_grad_(source.requires_grad)
        else:
            started[name] = torch.empty_like(parameter, device=like.device, dtype=like.dtype)
            torch.nn.init.normal_(started[name], std=0.0 if equal else config.initializer_range)
    mixture.load_state_dict(started, assign=True)
    return mixture.train(model.training)
