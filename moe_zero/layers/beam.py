"""Experts routed by beam search: the routed layer of the mixture-of-experts Q-Former.

A sample does not commit to one expert per layer. It carries K routed beams, each a route through the experts of
the layers so far with the product of its probabilities as score, and one universal beam that always takes the last
expert. Each routed layer extends every beam by every expert and keeps the K best.

Legend of shape suffixes: B samples, N beams of a sample (K = N - 1 routed and 1 universal), M rows that enter
(B in the first routed layer, B*N later), J routed beams of a sample that enter (1, then K), G = B * J of all samples,
k beams of a sample that leave, S = B * k of all samples, E experts (R = E - 1 routed), Q query rows of a beam, D hidden
size, L routed layers passed.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.experts import Experts
from moe_zero.ops.beam_step import beam_step
from moe_zero.ops.gate import gate
from moe_zero.ops.gelu_ffn import gelu_ffn
from moe_zero.ops.post_route import post_route_logits, post_route_outputs

ROUTINGS = ("post_route", "pre_route")
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
    """Experts routed by beam search, with a universal expert.

    Post-route, the gate looks at what the experts *produce*: the logit of expert e is the product of the gate vector
    with the mean over the Q query rows of FFN_e's output. Since that is linear in the output, the second product of an
    expert is computed only for beams that keep it. Pre-route, the gate looks at the mean of the input rows, and an
    expert is computed only where it is kept.

    Args:
        hidden_size: D.
        intermediate_size: F, the inner width of each expert.
        num_experts: E, at least 2; the last is the universal expert.
        num_beams: N, at least 2. Where a sample has fewer than K = N - 1 distinct routes yet (more beams than experts),
            the spare beams repeat one with score 0, so that a real route replaces them as soon as there is one.
        routing: ``"post_route"`` or ``"pre_route"``.
        weight_type: ``"ffn_prob"`` weighs a routed output by its probability p, ``"scaled_prob"`` by R * p (1 where the
            gate prefers no expert, as between equal experts), ``"one_hot"`` by 1.
        dropout: on the output of each expert.
        gate_sees_dropout: whether a post-route gate looks at the outputs after dropout, as in published code, which
            takes all second products while dropout acts; otherwise at the outputs before it.
        stacked: keep the experts' weights as one tensor [E, ...] of each kind; see :class:`Experts`.

    State dict: ``experts.{0..E-1}.dense{1,2}.{weight,bias}`` (or stacked) and ``gate.weight``, [1, D] post-route and
    [R, D] pre-route.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_beams: int,
        *,
        routing: str = "post_route",
        weight_type: str = "ffn_prob",
        dropout: float = 0.0,
        gate_sees_dropout: bool = True,
        stacked: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_experts < 2:
            raise ValueError(f"num_experts is {num_experts}; beam routing needs at least 2 (one routed, one universal)")
        if num_beams < 2:
            raise ValueError(f"num_beams is {num_beams}; beam routing needs at least 2 (one routed, one universal)")
        for name, value, choices in (("routing", routing, ROUTINGS), ("weight_type", weight_type, WEIGHT_TYPES)):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
        self.num_beams = num_beams
        self.num_routed = num_experts - 1
        self.routing = routing
        self.weight_type = weight_type
        self.gate_sees_dropout = gate_sees_dropout
        like = {"device": device, "dtype": dtype}
        sizes = (hidden_size, intermediate_size, num_experts)
        self.experts = Experts(*sizes, stacked=stacked, dropout=dropout, **like)
        rows = 1 if routing == "post_route" else self.num_routed
        self.gate = nn.Linear(hidden_size, rows, bias=False, **like)

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

        x_GQD = routed.flatten(0, 1)
        dropping = self.training and self.experts.dropout_p > 0
        dropped = dropping and self.routing == "post_route" and self.gate_sees_dropout
        if dropped:
            p_GR, outputs = self._post_route_dropped(x_GQD)
        else:
            p_GR, outputs = self._post_route(x_GQD) if self.routing == "post_route" else self._pre_route(x_GQD)

        scores, routes = (None, None) if beams is None else (beams.scores, beams.routes)
        step = beam_step(scores, p_GR, k, routes)
        groups_S, experts_S = step.parents.flatten(), step.experts.flatten()
        y_SQD = outputs(groups_S, experts_S, self._weights(p_GR, groups_S, experts_S))
        if dropping and not dropped:
            y_SQD = F.dropout(y_SQD, self.experts.dropout_p)
        hidden = torch.cat([y_SQD.unflatten(0, (-1, k)), self.experts[-1](universal)], dim=1)
        parents = step.parents % routed.shape[1]
        return BeamMoEOutput(hidden, BeamState(step.scores, step.routes, parents), p_GR.sum(0))

    def _weights(self, p_GR: Tensor, groups_S: Tensor, experts_S: Tensor) -> Tensor | None:
        if self.weight_type == "one_hot":
            return None
        p_S = p_GR.flatten().gather(0, groups_S * self.num_routed + experts_S)
        return p_S * self.num_routed if self.weight_type == "scaled_prob" else p_S

    # Each way to route returns the probabilities [G, R], fp32 whatever autocast does (rounding must not decide a
    # route), and a function from groups [S], experts [S] and weights [S] to the outputs [S, Q, D] of the chosen pairs.

    def _post_route(self, x_GQD: Tensor):
        w1, b1, w2, b2 = self._routed_weights()
        logits_GR, hidden = post_route_logits(x_GQD, self.gate.weight, w1, b1, w2, b2)
        return logits_GR.softmax(-1), lambda *chosen: post_route_outputs(hidden, *chosen, w2, b2)

    def _post_route_dropped(self, x_GQD: Tensor):
        y_GRQD = torch.stack([expert(x_GQD) for expert in islice(self.experts, self.num_routed)], dim=1)
        dtype = torch.promote_types(y_GRQD.dtype, torch.float32)
        logits_GR = (y_GRQD.mean(dim=2, dtype=dtype) * self.gate.weight.squeeze(0).to(dtype)).sum(-1)

        def outputs(groups_S: Tensor, experts_S: Tensor, weights_S: Tensor | None) -> Tensor:
            y_SQD = y_GRQD.flatten(0, 1).index_select(0, groups_S * self.num_routed + experts_S)
            return y_SQD if weights_S is None else weights_S[:, None, None] * y_SQD

        return logits_GR.softmax(-1), outputs

    def _pre_route(self, x_GQD: Tensor):
        probs = gate(x_GQD, self.gate.weight, 1).probs

        def outputs(groups_S: Tensor, experts_S: Tensor, weights_S: Tensor | None) -> Tensor:
            Q = x_GQD.shape[1]
            x_TD = x_GQD.index_select(0, groups_S).flatten(0, 1)
            ids_T1, weights_T1 = (
                None if per_pair is None else per_pair.repeat_interleave(Q).unsqueeze(1)
                for per_pair in (experts_S, weights_S)
            )
            return gelu_ffn(x_TD, ids_T1, weights_T1, *self._routed_weights()).unflatten(0, (-1, Q))

        return probs, outputs

    def _routed_weights(self):
        """Those of :meth:`Experts.weights` without the universal expert."""
        return tuple(None if kind is None else kind[: self.num_routed] for kind in self.experts.weights())
