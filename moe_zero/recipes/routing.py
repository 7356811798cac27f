"""How evenly the experts are used: load, its entropy, and experts that nothing goes to.

Legend of shape suffixes: I samples, L routed layers, R routed experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerLoad:
    """One routed layer's experts, the universal one aside, which sees every sample."""

    layer: int
    load: tuple[float, ...]
    """Share of the samples whose chosen route takes each expert."""
    entropy: float
    """Of the load, as a share of the highest there is: 1 where all carry the same, 0 where one carries everything."""
    dead: tuple[int, ...]
    """Experts that no sample took."""

    @classmethod
    def of(cls, layer: int, load: Sequence[float]) -> LayerLoad:
        entropy = 1.0
        if len(load) > 1:
            entropy = sum(-share * math.log(share) for share in load if share > 0) / math.log(len(load))
        return cls(layer, tuple(load), entropy, tuple(expert for expert, share in enumerate(load) if share == 0))


def loads_of_routes(routes_IL: Tensor, layers: Sequence[int], num_routed: int) -> list[LayerLoad]:
    """Of the routes that samples took; ``layers`` are the numbers of the routed layers."""
    shares_LR = torch.stack([torch.bincount(column, minlength=num_routed) for column in routes_IL.T]) / len(routes_IL)
    return [LayerLoad.of(layer, load) for layer, load in zip(layers, shares_LR.tolist(), strict=True)]


def figures(loads: Sequence[LayerLoad]) -> list[dict]:
    """As plain values."""
    return [{name: list(x) if isinstance(x, tuple) else x for name, x in asdict(load).items()} for load in loads]
