"""Experts routed by beam search: the routed layer of the mixture-of-experts Q-Former.

A sample does not commit to one expert per layer. It carries K routed beams, each a route through the experts of
the layers so far with the product of its probabilities as score, and one universal beam that always takes the last
expert. Each routed layer extends every beam by every expert and keeps the K best.

Legend of shape suffixes: B samples, N beams of a sample (K = N - 1 routed and 1 universal), M rows that enter
(B in the first routed layer, B*N later), J routed beams of a sample that enter (1, then K), k beams that leave,
E experts (R = E - 1 routed), Q query rows of a beam, D hidden size, L routed layers passed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.ffn import GeluFeedForward

WEIGHT_TYPES = ("ffn_prob", "scaled_prob", "one_hot")


class BeamState(NamedTuple):
    """The routed beams of every sample after a routed layer, best first. Carries no gradient."""

    scores: Tensor
    """[B, k], fp32: product of the probabilities of the experts on the route."""
    routes: Tensor
    """[B, k, L], int64: the expert taken in each routed layer."""
    parents: Tensor
    """[B, k], int64: which of the sample's beams, as they entered the layer, each one descends from."""


class BeamMoEOutput(NamedTuple):
    hidden: Tensor
    """[B, k + 1, Q, D]: the expert outputs of the k routed beams, then of the universal beam."""
    beams: BeamState
    importance: Tensor
    """[R], fp32: probability that each routed expert got, summed over the rows; see :func:`importance_loss`."""


def importance_loss(importance: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' importance, zero when all carry the same.

    Args:
        importance: [..., R], probability per routed expert summed over the rows of a batch. To get a loss that does not
            depend on how a batch is split over ranks, sum this over the ranks first (with gradient).

    Returns:
        [...]: (unbiased standard deviation / mean)² over the experts; 0 where R is 1 and there is nothing to balance.

    Source: Shazeer et al., arXiv 1701.06538, equations 6 and 7.
    """
    if importance.shape[-1] < 2:
        return importance.new_zeros(importance.shape[:-1])
    variance, mean = torch.var_mean(importance, dim=-1)
    # A batch without rows has mean 0 and variance 0; its loss is 0, not NaN.
    return variance / mean.square().clamp_min(torch.finfo(importance.dtype).tiny)


class BeamMoE(nn.Module):
    """Post-routed experts with beam search and a universal expert.

    The gate looks at what the experts *produce* (post-route): the logit of expert e is the product of the gate vector
    with the mean over the Q query rows of FFN_e's output.

    Args:
        hidden_size: D.
        intermediate_size: F, the inner width of each expert.
        num_experts: E, at least 2; the last is the universal expert.
        num_beams: N, at least 2. Where a sample has fewer than K = N - 1 distinct routes yet (more beams than experts),
            the spare beams repeat one with score 0, so that a real route replaces them as soon as there is one.
        weight_type: ``"ffn_prob"`` weighs a routed output by its probability p, ``"scaled_prob"`` by R * p (1 where the
            gate prefers no expert, as between equal experts), ``"one_hot"`` by 1.
        dropout: on the output of each expert.

    State dict: ``experts.{0..E-1}.dense{1,2}.{weight,bias}`` and ``gate.weight`` [1, D].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_beams: int,
        *,
        weight_type: str = "ffn_prob",
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_experts < 2:
            raise ValueError(f"num_experts is {num_experts}; beam routing needs at least 2 (one routed, one universal)")
        if num_beams < 2:
            raise ValueError(f"num_beams is {num_beams}; beam routing needs at least 2 (one routed, one universal)")
        if weight_type not in WEIGHT_TYPES:
            raise ValueError(f"weight_type is {weight_type!r}; it must be one of {', '.join(map(repr, WEIGHT_TYPES))}")
        self.num_beams = num_beams
        self.weight_type = weight_type
        self.experts = nn.ModuleList(
            GeluFeedForward(hidden_size, intermediate_size, dropout=dropout, device=device, dtype=dtype)
            for _ in range(num_experts)
        )
        self.gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)

    def forward(self, x_MQD: Tensor, beams: BeamState | None = None, *, num_best: int | None = None) -> BeamMoEOutput:
        """Extend every beam by every expert and keep the best.

        Args:
            x_MQD: [B, Q, D] in the first routed layer; later [B*N, Q, D], each sample's routed beams, then its
                universal beam.
            beams: what the previous routed layer returned; ``None`` in the first.
            num_best: how many routed beams leave; by default K = N - 1. The last routed layer needs 1.

        The probabilities, and with them the weights of the outputs, are differentiable; the choice of beams is not.
        """
        k = self.num_beams - 1 if num_best is None else num_best
        if beams is None:
            routed = universal = x_MQD.unsqueeze(1)  # [B, 1, Q, D]
        else:
            rows = x_MQD.unflatten(0, (-1, self.num_beams))
            routed, universal = rows[:, :-1], rows[:, -1:]

        x_PQD = routed.flatten(0, 1)
        y_BCQD = torch.stack([expert(x_PQD) for expert in self.experts[:-1]], dim=1)
        y_BCQD = y_BCQD.unflatten(0, routed.shape[:2]).flatten(1, 2)  # candidates C = J * R, expert fastest
        p_BC = self._probabilities(y_BCQD)

        best, beams = self._search(p_BC.detach(), beams, k)
        y_BkQD = y_BCQD.take_along_dim(best[:, :, None, None], dim=1)
        if self.weight_type != "one_hot":
            scale = len(self.experts) - 1 if self.weight_type == "scaled_prob" else 1
            y_BkQD = scale * p_BC.gather(1, best)[:, :, None, None] * y_BkQD
        hidden = torch.cat([y_BkQD, self.experts[-1](universal)], dim=1)
        return BeamMoEOutput(hidden, beams, p_BC.view(-1, len(self.experts) - 1).sum(0))

    def _probabilities(self, y_BCQD: Tensor) -> Tensor:
        """Softmax over the R experts of each beam, in fp32: routing must not depend on autocast's rounding."""
        mean_BCD = y_BCQD.mean(dim=2, dtype=torch.float32)
        logits_BC = (mean_BCD * self.gate.weight.squeeze(0).float()).sum(-1)
        return logits_BC.unflatten(1, (-1, len(self.experts) - 1)).softmax(-1).flatten(1)

    def _search(self, p_BC: Tensor, beams: BeamState | None, k: int) -> tuple[Tensor, BeamState]:
        """The k best candidates [B, k] of each sample and the beams that they make."""
        num_routed = len(self.experts) - 1
        scores_BC = p_BC
        if beams is not None:
            log_parent = beams.scores.log().repeat_interleave(num_routed, dim=1)
            scores_BC = (p_BC.log() + log_parent).exp()
        num_candidates = scores_BC.shape[1]
        if k > num_candidates:
            scores_BC = F.pad(scores_BC, (0, k - num_candidates))
        # A stable sort, not topk: equal scores keep the order of beams and experts on every device.
        scores, best = scores_BC.sort(dim=1, descending=True, stable=True)
        scores, best = scores[:, :k], best[:, :k] % num_candidates
        parents, experts = best // num_routed, best % num_routed
        routes = experts.unsqueeze(-1)
        if beams is not None:
            routes = torch.cat([beams.routes.take_along_dim(parents.unsqueeze(-1), dim=1), routes], dim=-1)
        return best, BeamState(scores, routes, parents)
