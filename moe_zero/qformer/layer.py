"""One block of the Q-Former: self-attention, cross-attention, text feed-forward, and experts for the queries.

Query rows and text rows live in tensors of their own, contiguous each: they meet only in self-attention, and a
product over a slice of a joint tensor would copy it.

Legend of shape suffixes: B samples, N beams, M rows (B, or B*N between the first routed layer and the last), Q
queries, T text tokens, S = Q + T (and what came before, where there is a cache), H heads, D hidden size, P image
tokens, W image width, k routed beams that leave a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.beam import BeamMoE, BeamState
from moe_zero.layers.ffn import GeluFeedForward
from moe_zero.layers.token import TokenMoE
from moe_zero.qformer.attention import KeyValue, QFormerAttention, ResidualOutput
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


class LayerCache(NamedTuple):
    """What a block keeps of the positions it has seen, for text that comes after them."""

    seen: KeyValue
    """[M, H, S, D / H] each, of the rows as they entered the block."""
    parents: Tensor | None
    """[B, k]: which of the rows that entered each routed beam that left descends from; ``None`` where the block doesn't
    route beams. Text follows its sample's beams, and does not change them."""

    def select(self, samples: Tensor, batch: int) -> LayerCache:
        """The cache of some of the ``batch`` samples: int64 [B'], any of them any number of times."""
        rows_per_sample = self.seen.key.shape[0] // batch
        places = torch.arange(rows_per_sample, device=samples.device)
        rows = (samples[:, None] * rows_per_sample + places).flatten()
        parents = None if self.parents is None else self.parents.index_select(0, samples)
        return LayerCache(KeyValue(*(x.index_select(0, rows) for x in self.seen)), parents)


class LayerOutput(NamedTuple):
    """What a block returns."""

    rows: Rows
    beams: BeamState | None
    """The beams that the rows stand for; ``None`` where nothing routed yet; after the last routed layer the best route
    alone."""
    importance: Tensor | None
    """Of a routed layer's experts: [R], or [E] where none is universal."""
    cache: LayerCache | None
    """On demand."""


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
        past: LayerCache | None = None,
        *,
        keep: bool = False,
    ) -> LayerOutput:
        """Run the block.

        Args:
            rows: query and text rows.
            mask: additive attention mask of the samples, [B, 1, 1 or as many as rows look, S], or ``None``; beams share
                their sample's.
            image_BPW: image features, shared by the beams of a sample.
            image_mask: additive, [B, 1, 1, P], or ``None``.
            beams: state of the beam search if an earlier layer routed, else ``None``.
            past: what an earlier call with the queries kept. The rows are then text alone: it sees the queries, and
                takes the ways that their beams took, without any of their work being done again.
            keep: return a cache for text that is to come.
        """
        if past is not None:
            return self._continue(rows.text, mask, past, keep)
        if rows.queries is None:
            text = self._text_feed_forward(self.attention(rows.text, mask))
            return LayerOutput(Rows(None, text), beams, importance=None, cache=None)
        (queries, text), seen = self._attend(rows, mask)
        if self.crossattention is not None:
            queries = self.crossattention(queries, image_mask, image_BPW, rows_per_image=self.rows_per_sample)
        if not self.routes_beams:
            queries = self.expert_ln(self.experts(queries) + queries)
            text = None if text is None else self._text_feed_forward(text)
            importance = self.experts.routing.importance if isinstance(self.experts, TokenMoE) else None
            return LayerOutput(Rows(queries, text), beams, importance, LayerCache(seen, None) if keep else None)

        hidden, new_beams, importance = self.experts(queries, beams, num_best=1 if self.merges else None)
        queries = self.expert_ln(hidden + self._residual(queries, beams, new_beams))
        if text is not None:
            text = self._follow_parents(self._text_feed_forward(text), new_beams.parents)
        merged = [None if part is None else self._merge(part) for part in (queries, text)]
        return LayerOutput(Rows(*merged), new_beams, importance, LayerCache(seen, new_beams.parents) if keep else None)

    def _continue(self, text: Tensor, mask: Tensor | None, past: LayerCache, keep: bool) -> LayerOutput:
        seen = past.seen.followed_by(self.attention.key_value(text))
        text = self._text_feed_forward(self.attention(text, self._of_rows(mask), key_value=seen))
        if past.parents is not None:
            text = self._merge(self._follow_parents(text, past.parents))
        return LayerOutput(
            Rows(None, text), beams=None, importance=None, cache=LayerCache(seen, past.parents) if keep else None
        )

    def _attend(self, rows: Rows, mask: Tensor | None) -> tuple[Rows, KeyValue]:
        joined = rows.joined()
        seen = self.attention.key_value(joined)
        joined = self.attention(joined, self._of_rows(mask), key_value=seen)
        if rows.text is None:
            return Rows(joined, None), seen
        num_queries = rows.queries.shape[1]
        return Rows(joined[:, :num_queries].contiguous(), joined[:, num_queries:].contiguous()), seen

    def _of_rows(self, mask: Tensor | None) -> Tensor | None:
        """A mask of samples as one of the rows that enter."""
        if mask is None or self.rows_per_sample == 1:
            return mask
        return mask.repeat_interleave(self.rows_per_sample, dim=0)

    def _text_feed_forward(self, text: Tensor) -> Tensor:
        return self.output(self.intermediate(text), text)

    def _residual(self, queries: Tensor, beams: BeamState | None, new_beams: BeamState) -> Tensor:
        """Input rows that the expert outputs [B, k + 1, Q, D] are added to."""
        if beams is None or self.residual_from == "parent":
            return self._follow_parents(queries, new_beams.parents)
        rows = queries.unflatten(0, (-1, self.rows_per_sample))
        num_routed = new_beams.scores.shape[1]
        return rows if num_routed == rows.shape[1] - 1 else torch.cat([rows[:, :num_routed], rows[:, -1:]], dim=1)

    def _follow_parents(self, x: Tensor, parents: Tensor) -> Tensor:
        """[M, ...] to [B, k + 1, ...]: every routed beam takes its parent's row, the universal beam its own."""
        if self.rows_per_sample == 1:  # the first routed layer: a sample is the parent of all its beams
            return x.unsqueeze(1).expand(-1, parents.shape[1] + 1, -1, -1)
        rows = x.unflatten(0, (-1, self.rows_per_sample))
        routed = rows.take_along_dim(parents[:, :, None, None], dim=1)
        return torch.cat([routed, rows[:, -1:]], dim=1)

    def _merge(self, x: Tensor) -> Tensor:
        """[B, k + 1, ...] to rows [B * (k + 1), ...]; in the last routed layer universal and best in one, [B, ...]."""
        if not self.merges:
            return x.flatten(0, 1)
        return x.sum(dim=1) if self.merge == "sum" else x.mean(dim=1)
