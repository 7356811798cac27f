"""Which beams of experts a picture's queries went through, layer by layer, for looking at.

Legend of shape suffixes: P image tokens, W image width, k routed beams after a layer, R routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_zero.qformer import QFormerModel


@dataclass(frozen=True)
class Beam:
    """A routed beam after a layer."""

    expert: int
    """The expert that it took in the layer."""
    parent: int
    """Place, among the beams that entered, of the one that it goes on from; 0 in the first routed layer."""
    score: float
    """Product of the probabilities of all experts on its route."""


@dataclass(frozen=True)
class RoutedLayer:
    """The beams that a layer kept, best first; in the last routed layer the chosen one alone."""

    index: int
    beams: tuple[Beam, ...]


@torch.no_grad()
def trace_beams(model: QFormerModel, image_1PW: Tensor) -> list[RoutedLayer]:
    """The beams of one picture.

    Args:
        image_1PW: [1, P, W], raw image tokens.

    Raises:
        ValueError: the model routes no beams.
    """
    if not model.config.beam_layers:
        raise ValueError("the model routes no beams: it is dense, or routes tokens or sequences")
    layers: list[RoutedLayer] = []

    def record(index: int):
        def hook(module, arguments, output) -> None:
            scores, routes, parents = (part[0].tolist() for part in output.beams)
            beams = zip(routes, parents, scores, strict=True)
            layers.append(RoutedLayer(index, tuple(Beam(route[-1], parent, score) for route, parent, score in beams)))

        return hook

    hooks = [model.encoder.layer[index].register_forward_hook(record(index)) for index in model.config.beam_layers]
    try:
        model(image_features=image_1PW)
    finally:
        for hook in hooks:
            hook.remove()
    return layers
