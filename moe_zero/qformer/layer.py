"""One block of the Q-Former: self-attention, cross-attention, text feed-forward, and experts for the queries.

Query rows and text rows live in tensors of their own, contiguous each: they meet only in self-attention, and a
product over a slice of a joint tensor would copy it.

Legend of shape suffixes: B samples, N beams, M rows (B, or B*N between the first routed layer and the last), Q
queries, T text tokens, S = Q + T, D hidden size, P image tokens, W image width, k routed beams that leave a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.beam import BeamMoE, BeamState
from moe_zero.layers.ffn import GeluFeedForward
from moe_zero.layers.token import TokenMoE
from moe_zero.qformer.attention import QFormerAttention, ResidualOutput
from moe_zero.qformer.config import QFormerConfig


class Rows(NamedTuple):
    """What a block receives and returns. Either part may be ``None``, not both."""

    queries: Tensor | None
    """[M, Q, D]"""
    text: Tensor | None
    """[M, T, D]"""

    def joined(self) -> Tensor:
        """[M, Q + T, D], the queries in front."""
        return torch.cat([part for part in self if part is not None], dim=1)


class TextIntermediate(nn.Module):
    """First half of the text feed-forward; its name is that of BERT checkpoints."""

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class QFormerLayer(nn.Module):
    """Block ``index`` of a Q-Former.

    Args:
        config: the model's configuration; it says whether this layer has cross-attention, whether it routes, and
            whether it is the last that routes, where the beams of a sample merge.
        index: the layer's number, from 0.
    """

    def __init__(self, config: QFormerConfig, index: int):
        super().__init__()
        self.attention = QFormerAttention(config)
        has_cross_attention = index in config.cross_attention_layers
        self.crossattention = QFormerAttention(config, cross=True) if has_cross_attention else None
        self.intermediate = TextIntermediate(config) if config.use_text else None
        self.output = ResidualOutput(config, config.intermediate_size) if config.use_text else None

        beam_layers = config.beam_layers
        self.routes_beams = index in beam_layers
        self.merges = self.routes_beams and index == beam_layers[-1]
        carries_beams = beam_layers and beam_layers[0] < index <= beam_layers[-1]
        self.rows_per_sample = config.num_beams if carries_beams else 1
        self.residual_from = config.residual_from
        self.merge = config.merge
        sizes = (config.hidden_size, config.intermediate_size)
        if self.routes_beams:
            self.experts = BeamMoE(
                *sizes,
                config.num_experts,
                config.num_beams,
                routing=config.routing,
                weight_type=config.weight_type,
                dropout=config.hidden_dropout_prob,
                gate_sees_dropout=config.gate_sees_dropout,
            )
        elif index in config.routed_layers:
            self.experts = TokenMoE(
                *sizes,
                config.num_experts,
                config.top_k,
                granularity=config.routing,
                renormalize=False,  # with one expert per token, its probability is the gate's only gradient
                dropout=config.hidden_dropout_prob,
            )
        else:
            self.experts = GeluFeedForward(*sizes, dropout=config.hidden_dropout_prob)
        self.expert_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        rows: Rows,
        mask: Tensor | None = None,
        image_BPW: Tensor | None = None,
        image_mask: Tensor | None = None,
        beams: BeamState | None = None,
    ) -> tuple[Rows, BeamState | None, Tensor | None]:
        """Run the block.

        Args:
            rows: query and text rows.
            mask: additive attention mask of the samples, [B, 1, 1 or S, S], or ``None``; beams share their sample's.
            image_BPW: image features, shared by the beams of a sample.
            image_mask: additive, [B, 1, 1, P], or ``None``.
            beams: state of the beam search if an earlier layer routed, else ``None``.

        Returns:
            The rows, the beams that they stand for (``None`` where nothing routed yet; after the last routed layer the
            best route alone), and the importance of a routed layer's experts: [R], or [E] where none is universal.
        """
        if rows.queries is None:
            return Rows(None, self._text_feed_forward(self.attention(rows.text, mask))), beams, None
        queries, text = self._attend(rows, mask)
        if self.crossattention is not None:
            queries = self.crossattention(queries, image_mask, image_BPW, rows_per_image=self.rows_per_sample)
        if not self.routes_beams:
            queries = self.expert_ln(self.experts(queries) + queries)
            text = None if text is None else self._text_feed_forward(text)
            importance = self.experts.routing.importance if isinstance(self.experts, TokenMoE) else None
            return Rows(queries, text), beams, importance

        hidden, new_beams, importance = self.experts(queries, beams, num_best=1 if self.merges else None)
        queries = self.expert_ln(hidden + self._residual(queries, beams, new_beams))
        if text is not None:
            text = self._follow_parents(self._text_feed_forward(text), beams, new_beams)
        merged = [None if part is None else self._merge(part) for part in (queries, text)]
        return Rows(*merged), new_beams, importance

    def _attend(self, rows: Rows, mask: Tensor | None) -> Rows:
        if mask is not None and self.rows_per_sample > 1:
            mask = mask.repeat_interleave(self.rows_per_sample, dim=0)
        joined = self.attention(rows.joined(), mask)
        if rows.text is None:
            return Rows(joined, None)
        num_queries = rows.queries.shape[1]
        return Rows(joined[:, :num_queries].contiguous(), joined[:, num_queries:].contiguous())

    def _text_feed_forward(self, text: Tensor) -> Tensor:
        return self.output(self.intermediate(text), text)

    def _residual(self, queries: Tensor, beams: BeamState | None, new_beams: BeamState) -> Tensor:
        """Input rows that the expert outputs [B, k + 1, Q, D] are added to."""
        if beams is None or self.residual_from == "parent":
            return self._follow_parents(queries, beams, new_beams)
        rows = queries.unflatten(0, (-1, self.rows_per_sample))
        num_routed = new_beams.scores.shape[1]
        return rows if num_routed == rows.shape[1] - 1 else torch.cat([rows[:, :num_routed], rows[:, -1:]], dim=1)

    def _follow_parents(self, x: Tensor, beams: BeamState | None, new_beams: BeamState) -> Tensor:
        """[M, ...] to [B, k + 1, ...]: every routed beam takes its parent's row, the universal beam its own."""
        if beams is None:
            return x.unsqueeze(1).expand(-1, new_beams.scores.shape[1] + 1, -1, -1)
        rows = x.unflatten(0, (-1, self.rows_per_sample))
        routed = rows.take_along_dim(new_beams.parents[:, :, None, None], dim=1)
        return torch.cat([routed, rows[:, -1:]], dim=1)

    def _merge(self, x: Tensor) -> Tensor:
        """[B, k + 1, ...] to rows [B * (k + 1), ...]; in the last routed layer universal and best in one, [B, ...]."""
        if not self.merges:
            return x.flatten(0, 1)
        return x.sum(dim=1) if self.merge == "sum" else x.mean(dim=1)
