"""The two-layer GELU feed-forward of a transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.ops.gelu_ffn import gelu_ffn_dense

APPROXIMATIONS = ("none", "tanh")


class GeluFeedForward(nn.Module):
    """``dense2(gelu(dense1(x)))`` with dropout on the result.

    One expert of a mixture, and the query feed-forward of a dense Q-Former layer.

    Args:
        hidden_size: D, the width of the rows.
        intermediate_size: F, the width between the two products.
        bias: whether the two products add one.
        approximate: ``"none"`` for the exact (erf) GELU, ``"tanh"`` for its approximation.
        dropout: probability that an element of the result is zeroed in training.

    Shapes: ``x`` [..., D] to [..., D], in the dtype of the weights (or of autocast).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = True,
        approximate: str = "none",
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if approximate not in APPROXIMATIONS:
            raise ValueError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
        self.approximate = approximate
        self.dense1 = nn.Linear(hidden_size, intermediate_size, bias=bias, device=device, dtype=dtype)
        self.dense2 = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        w1_FD, b1_F, w2_DF, b2_D = self.weights()
        if x.is_cuda:
            experts = ([w1_FD], None if b1_F is None else [b1_F], [w2_DF], None if b2_D is None else [b2_D])
            y = gelu_ffn_dense(x.reshape(-1, x.shape[-1]), *experts, approximate=self.approximate).view(x.shape)
        else:  # with one expert there is nothing to group: on the CPU the operator would only add its overhead
            y = F.linear(F.gelu(F.linear(x, w1_FD, b1_F), approximate=self.approximate), w2_DF, b2_D)
        return self.dropout(y)

    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Weight [F, D] and bias [F] of the first product, weight [D, F] and bias [D] of the second."""
        return self.dense1.weight, self.dense1.bias, self.dense2.weight, self.dense2.bias
