"""The two-layer GELU feed-forward of a transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GeluFeedForward(nn.Module):
    """``dense2(gelu(dense1(x)))`` with dropout on the result, GELU in its exact (erf) form.

    One expert of a mixture, and the query feed-forward of a dense Q-Former layer.

    Args:
        hidden_size: D, the width of the rows.
        intermediate_size: F, the width between the two products.
        dropout: probability that an element of the result is zeroed in training.

    Shapes: ``x`` [..., D] to [..., D], in the dtype of the weights (or of autocast).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, dropout: float = 0.0, device=None, dtype=None):
        super().__init__()
        self.dense1 = nn.Linear(hidden_size, intermediate_size, device=device, dtype=dtype)
        self.dense2 = nn.Linear(intermediate_size, hidden_size, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dense2(F.gelu(self.dense1(x))))
