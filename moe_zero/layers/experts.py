"""The feed-forwards of a mixture: separate modules, or one tensor of each kind for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.ffn import GeluFeedForward

KINDS = {"dense1_weight": "dense1.weight", "dense1_bias": "dense1.bias"}
KINDS |= {"dense2_weight": "dense2.weight", "dense2_bias": "dense2.bias"}
"""Name of a stacked parameter to the name of an expert's own."""


class Experts(nn.Module):
    """E two-layer GELU feed-forwards.

    Kept as modules, their parameters are ``{0..E-1}.dense{1,2}.{weight,bias}``, as in published checkpoints. With
    ``stacked=True`` there are four parameters instead: ``dense1_weight`` [E, F, D], ``dense1_bias`` [E, F],
    ``dense2_weight`` [E, D, F], ``dense2_bias`` [E, D]. Either way a state dict of the other kind loads too.

    Args:
        hidden_size: D.
        intermediate_size: F.
        num_experts: E.
        stacked: one tensor of each kind instead of one module per expert.
        bias, approximate, dropout: as in :class:`GeluFeedForward`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        stacked: bool = False,
        bias: bool = True,
        approximate: str = "none",
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.stacked = stacked
        self.approximate = approximate
        self.dropout_p = dropout
        if stacked:
            D, W = hidden_size, intermediate_size
            shapes = {"dense1_weight": (W, D), "dense1_bias": (W,), "dense2_weight": (D, W), "dense2_bias": (D,)}
            for name, shape in shapes.items():
                wanted = bias or name.endswith("weight")
                tensor = torch.empty(num_experts, *shape, device=device, dtype=dtype) if wanted else None
                self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
            self.dropout = nn.Dropout(dropout)
            self.reset_parameters()
        else:
            options = {"bias": bias, "approximate": approximate, "dropout": dropout, "device": device, "dtype": dtype}
            for index in range(num_experts):
                self.add_module(str(index), GeluFeedForward(hidden_size, intermediate_size, **options))
        self.register_load_state_dict_pre_hook(_accept_other_kind)

    def reset_parameters(self) -> None:
        """What ``nn.Linear`` would draw for each expert; of use for stacked weights only."""
        for weight, bias in ((self.dense1_weight, self.dense1_bias), (self.dense2_weight, self.dense2_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def weights(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None, Sequence[Tensor], Sequence[Tensor] | None]:
        """First weights and biases, second weights and biases, each one stacked tensor or one tensor per expert: what
        :func:`moe_zero.ops.gelu_ffn.gelu_ffn` takes."""
        if self.stacked:
            return self.dense1_weight, self.dense1_bias, self.dense2_weight, self.dense2_bias
        kinds = zip(*(expert.weights() for expert in self.children()), strict=True)
        return tuple(None if kind[0] is None else list(kind) for kind in kinds)

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, index: int):
        """Expert ``index`` as a function of x [..., D]; the module itself where there is one."""
        index = range(self.num_experts)[index]
        return self._call(index) if self.stacked else self.get_submodule(str(index))

    def __iter__(self) -> Iterator:
        return (self[index] for index in range(self.num_experts))

    def _call(self, index: int):
        w1, b1, w2, b2 = (None if kind is None else kind[index] for kind in self.weights())
        return lambda x: self.dropout(F.linear(F.gelu(F.linear(x, w1, b1), approximate=self.approximate), w2, b2))


def _accept_other_kind(module: Experts, state_dict: dict, prefix: str, *_) -> None:
    """Turn the keys of stacked weights into those of separate ones, or the other way round."""
    for stacked, own in KINDS.items():
        names = [f"{prefix}{index}.{own}" for index in range(module.num_experts)]
        if module.stacked and all(name in state_dict for name in names):
            state_dict[prefix + stacked] = torch.stack([state_dict.pop(name) for name in names])
        elif not module.stacked and prefix + stacked in state_dict:
            tensor = state_dict[prefix + stacked]
            if len(tensor) == module.num_experts:  # else load_state_dict says what does not fit
                state_dict.update(zip(names, state_dict.pop(prefix + stacked).unbind(), strict=True))
