"""What a Q-Former is trained for in BLIP-2's first stage, as one module that takes tensors and returns losses.

- Image-text contrastive (ITC): each picture is represented by its queries, each caption by its first row; a pair's
  similarity is that of the best query. Every picture picks its captions among all of the global batch, and the other
  way round.
- Image-text matching (ITM): queries and caption see each other, and a head says whether they belong together. Wrong
  pairs are drawn from the global batch, the more similar the likelier.
- Language modelling (LM): the caption is predicted word by word from the picture's queries, which don't see it. It
  reuses the contrastive objective's pass over the queries: text comes after its cached keys and values. Targets are
  smoothed, the start token stands in the place of ``[CLS]``, padding counts for nothing.
- Gate loss: the experts' importance over the global batch, evenly spread.

Every loss is defined on the global batch. On a rank they are shares whose mean over ranks is that loss, and whose
gradients, averaged over ranks, are its gradient: what data parallelism and ZeRO do with them. So a run gives the same
losses on any number of processes, as long as there is no dropout.

Source: Li et al., BLIP-2, arXiv 2301.12597, section 3.1; Li et al., ALBEF, arXiv 2107.07651, section 3.2 (hard
negatives); Szegedy et al., arXiv 1512.00567, section 7 (label smoothing).

Legend of shape suffixes: B pairs on this rank, G pairs on all ranks, Q queries, T text tokens, P image tokens, W
image width, D hidden size, C contrastive width, V vocabulary, L routed layers, R routed experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.beam import importance_loss
from moe_zero.qformer.cache import QFormerCache
from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.model import QFormerModel, QFormerOutput

# torch 2.14 renamed the two collectives: the former names warn there, the new ones do not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OBJECTIVES = ("itc", "itm", "lm")
LABEL_SMOOTHING = 0.1
IGNORED = -100
"""Target of a place that is no word."""
FIRST_TEMPERATURE, LEAST_TEMPERATURE = 0.07, 0.01


class Losses(NamedTuple):
    """This rank's share of each loss, []; only ``total`` carries a gradient."""

    total: Tensor
    itc: Tensor
    itm: Tensor
    """0 where matching is no objective; so is its accuracy."""
    lm: Tensor
    """Per word of the global batch; 0 where language modelling is no objective; so is its accuracy."""
    gate: Tensor
    """Before its weight; the same on all ranks."""
    itc_accuracy: Tensor
    """Share of pictures (and of captions, averaged) whose best partner in the global batch is a right one."""
    itm_accuracy: Tensor
    lm_accuracy: Tensor
    """Share of the words, the end included, that get the highest score."""
    temperature: Tensor
    expert_load_LR: Tensor | None
    """[L, R]: share of the samples whose chosen route takes each routed expert, over all passes with queries; ``None``
    where no beams are routed."""


class ImageEmbedding(NamedTuple):
    queries: Tensor
    """[B, Q, C], fp32, of length 1."""
    expert_route: Tensor | None
    """[B, L]: the experts taken; ``None`` in a dense model."""


class NextWords(NamedTuple):
    logits: Tensor
    """[B, T, V], fp32: scores of the word after each one that was read."""
    cache: QFormerCache
    """For the words that follow."""


class QFormerPretraining(nn.Module):
    """A Q-Former with the heads of its first training stage.

    Args:
        config: the Q-Former's; it gets a language-modelling head where ``"lm"`` is an objective.
        embed_dim: width of the contrastive space.
        objectives: which of `OBJECTIVES`; ``"itc"`` must be among them.
        gate_weight: weight of the gate loss.
        start_id: the token that a caption starts with in place of ``[CLS]`` where it is predicted; by default the last
            of the vocabulary, as in published checkpoints.
        process_group: the ranks that share a global batch; ``None`` is the default group, or this process alone where
            there is none. Every rank must hold the same number of pairs.

    Raises:
        ValueError: an objective is unknown, or ``"itc"`` is not among them.
    """

    def __init__(
        self,
        config: QFormerConfig,
        *,
        embed_dim: int = 256,
        objectives: Sequence[str] = OBJECTIVES,
        gate_weight: float = 0.01,
        start_id: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        if "itc" not in objectives or not set(objectives) <= set(OBJECTIVES):
            raise ValueError(
                f"objectives is {list(objectives)}; it must be a list of {list(OBJECTIVES)} with 'itc' in it"
            )
        self.objectives = tuple(objectives)
        self.gate_weight = gate_weight
        self.start_id = config.vocab_size - 1 if start_id is None else start_id
        self.process_group = process_group
        if "lm" in objectives:
            config = replace(config, lm_head=True)
        self.qformer = QFormerModel(config)
        self.image_projection = nn.Linear(config.hidden_size, embed_dim)
        self.text_projection = nn.Linear(config.hidden_size, embed_dim)
        self.log_temperature = nn.Parameter(torch.tensor([math.log(FIRST_TEMPERATURE)]))
        if "itm" in objectives:
            self.matching_head = nn.Linear(config.hidden_size, 2)
        for head in (module for module in self.children() if isinstance(module, nn.Linear)):
            nn.init.normal_(head.weight, std=config.initializer_range)
            nn.init.zeros_(head.bias)

    def forward(
        self,
        image_features: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        image_ids: Tensor | None = None,
        negative_draws: Tensor | None = None,
        cache: QFormerCache | None = None,
        task: str = "losses",
    ) -> Losses | ImageEmbedding | QFormerCache | NextWords | Tensor:
        """One entry for training and for use, so that a wrapper around ``forward`` (sharding) sees every call.

        Args:
            image_features: [B, P, W], raw image tokens.
            input_ids: [B, T], int64.
            attention_mask: [B, T], 1 to keep.
            image_ids: [B], int64: pairs with the same number show the same picture; all its captions are right.
            negative_draws: [B, 2] in [0, 1), fp32: the random numbers that choose each picture's wrong caption and
                each caption's wrong picture. Cut from one [G, 2] tensor, they make the choice independent of the
                number of ranks.
            cache: what captions go on from.
            task: ``"losses"``: all arguments but ``cache``, gives `Losses`. ``"images"``: ``image_features``, gives an
                `ImageEmbedding`. ``"texts"``: ids and mask, gives [B, C] of length 1. ``"match"``: features, ids and
                mask, gives [B], the logit that they belong together. ``"look"``: ``image_features``, gives the
                `QFormerCache` of the queries; ``"read"``: ``cache`` and ids (the first is ``start_id``), gives
                `NextWords`.

        Raises:
            ValueError: ``task`` is unknown, or a tensor that it needs is missing.
        """
        needed = {
            "losses": ("image_features", "input_ids", "attention_mask", "image_ids")
            + (("negative_draws",) if "itm" in self.objectives else ()),
            "images": ("image_features",),
            "texts": ("input_ids", "attention_mask"),
            "match": ("image_features", "input_ids", "attention_mask"),
            "look": ("image_features",),
            "read": ("cache", "input_ids"),
        }
        if task not in needed:
            raise ValueError(f"task is {task!r}; it must be one of {', '.join(map(repr, needed))}")
        given = {
            "image_features": image_features,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "image_ids": image_ids,
            "negative_draws": negative_draws,
            "cache": cache,
        }
        missing = [name for name in needed[task] if given[name] is None]
        if missing:
            raise ValueError(f"task {task!r} needs {', '.join(missing)}")
        if task == "images":
            embedding, output = self._embed_images(image_features)
            return ImageEmbedding(embedding, output.expert_route)
        if task == "texts":
            return self._embed_texts(input_ids, attention_mask)
        if task == "match":
            if "itm" not in self.objectives:
                raise ValueError(f"task 'match' needs a matching head, but objectives is {list(self.objectives)}")
            logits_B2, _ = self._match(image_features, input_ids, attention_mask)
            return logits_B2[:, 1] - logits_B2[:, 0]
        if task in ("look", "read") and "lm" not in self.objectives:
            raise ValueError(
                f"task {task!r} needs a language-modelling head, but objectives is {list(self.objectives)}"
            )
        if task == "look":
            return self.qformer(image_features=image_features, use_cache=True).cache
        if task == "read":
            output = self.qformer(input_ids=input_ids, cache=cache, use_cache=True)
            return NextWords(self.qformer.next_word_logits(output.last_hidden_state).float(), output.cache)
        return self._losses(image_features, input_ids, attention_mask, image_ids, negative_draws)

    def _embed_images(self, image_features: Tensor, *, use_cache: bool = False) -> tuple[Tensor, QFormerOutput]:
        output = self.qformer(image_features=image_features, use_cache=use_cache)
        return F.normalize(self.image_projection(output.last_hidden_state).float(), dim=-1), output

    def _embed_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.qformer(input_ids=input_ids, attention_mask=attention_mask)
        return F.normalize(self.text_projection(output.last_hidden_state[:, 0]).float(), dim=-1)

    def _match(self, image_features: Tensor, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, QFormerOutput]:
        output = self.qformer(image_features=image_features, input_ids=input_ids, attention_mask=attention_mask)
        queries = output.last_hidden_state[:, : self.qformer.config.num_query_tokens]
        return self.matching_head(queries).float().mean(dim=1), output

    def _losses(self, image_features, input_ids, attention_mask, image_ids, negative_draws) -> Losses:
        image_BQC, image_output = self._embed_images(image_features, use_cache="lm" in self.objectives)
        text_BC = self._embed_texts(input_ids, attention_mask)
        temperature = self.log_temperature.exp().clamp_min(LEAST_TEMPERATURE)

        group = self.process_group
        image_GQC, text_GC = gather_rows(image_BQC, group), gather_rows(text_BC, group)
        with torch.autocast(image_features.device.type, enabled=False):
            to_text_BG = best_query_similarity(image_BQC, text_GC) / temperature
            to_image_BG = best_query_similarity(image_GQC, text_BC).T / temperature
        positive_BG = image_ids[:, None] == gather_rows(image_ids, group)[None, :]
        target_BG = positive_BG / positive_BG.sum(1, keepdim=True)
        itc = (F.cross_entropy(to_text_BG, target_BG) + F.cross_entropy(to_image_BG, target_BG)) / 2
        with torch.no_grad():
            hits = [positive_BG.gather(1, scores.argmax(1, keepdim=True)) for scores in (to_text_BG, to_image_BG)]
            itc_accuracy = torch.cat(hits).float().mean()

        outputs = [image_output]
        itm = itm_accuracy = itc.new_zeros(())
        if "itm" in self.objectives:
            with torch.no_grad():
                wrong_text_B = draw_negatives(to_text_BG, positive_BG, negative_draws[:, 0])
                wrong_image_B = draw_negatives(to_image_BG, positive_BG, negative_draws[:, 1])
                features_GPW, ids_GT, mask_GT = (
                    gather_rows(x, group) for x in (image_features, input_ids, attention_mask)
                )
            logits, match_output = self._match(
                torch.cat([image_features, image_features, features_GPW[wrong_image_B]]),
                torch.cat([input_ids, ids_GT[wrong_text_B], input_ids]),
                torch.cat([attention_mask, mask_GT[wrong_text_B], attention_mask]),
            )
            outputs.append(match_output)
            pairs = len(image_ids)
            label = (torch.arange(3 * pairs, device=logits.device) < pairs).long()
            # A picture that fills the whole batch has no wrong partner; the pair drawn for it then doesn't count.
            has_negative_B = ~positive_BG.all(1)
            counts = torch.cat([torch.ones_like(has_negative_B), has_negative_B, has_negative_B]).float()
            itm = (F.cross_entropy(logits, label, reduction="none") * counts).mean()
            itm_accuracy = (logits.argmax(1) == label).float().mean()

        lm = lm_accuracy = itc.new_zeros(())
        if "lm" in self.objectives:
            lm, lm_accuracy = self._caption_loss(image_output.cache, input_ids, attention_mask)

        gate = itc.new_zeros(())
        importance = [output.gate_importance for output in outputs if output.gate_importance is not None]
        if importance:
            gate = importance_loss(sum_over_ranks(torch.stack(importance), group)).sum() / len(importance)
        load_LR = None
        if image_output.expert_route is not None:
            routed = torch.arange(importance[0].shape[-1], device=itc.device)
            routes_ML = torch.cat([output.expert_route for output in outputs])
            load_LR = (routes_ML[..., None] == routed).float().mean(0)
        return Losses(
            total=itc + itm + lm + self.gate_weight * gate,
            itc=itc.detach(),
            itm=itm.detach(),
            lm=lm.detach(),
            gate=gate.detach(),
            itc_accuracy=itc_accuracy,
            itm_accuracy=itm_accuracy,
            lm_accuracy=lm_accuracy,
            temperature=temperature.squeeze().detach(),
            expert_load_LR=load_LR,
        )

    def _caption_loss(self, cache: QFormerCache, ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share of the loss, and of the words that are right."""
        start_B1 = ids_BT.new_full((len(ids_BT), 1), self.start_id)
        read_BT = torch.cat([start_B1, ids_BT[:, 1:-1]], dim=1)
        output = self.qformer(input_ids=read_BT, attention_mask=mask_BT[:, :-1], cache=cache)
        logits_MV = self.qformer.next_word_logits(output.last_hidden_state).float().flatten(0, 1)
        counts_M = mask_BT[:, 1:].flatten() != 0
        target_M = ids_BT[:, 1:].flatten().masked_fill(~counts_M, IGNORED)
        loss = F.cross_entropy(
            logits_MV, target_M, ignore_index=IGNORED, label_smoothing=LABEL_SMOOTHING, reduction="sum"
        )
        with torch.no_grad():
            right = (logits_MV.argmax(1) == target_M).sum()
            words = sum_over_ranks(counts_M.sum().float(), self.process_group)
            ranks = 1 if _alone(self.process_group) else dist.get_world_size(self.process_group)
            share = ranks / words.clamp_min(1)
        return loss * share, right * share


def best_query_similarity(image_BQC: Tensor, text_GC: Tensor) -> Tensor:
    """Cosine of each caption with the query that fits it best: [B, G] from [B, Q, C] and [G, C] of length 1."""
    return torch.einsum("bqc,gc->bgq", image_BQC, text_GC).amax(-1)


def draw_negatives(scores_BG: Tensor, positive_BG: Tensor, draws_B: Tensor) -> Tensor:
    """For each row one column that is not positive, with probability softmax(scores) over those columns.

    Args:
        scores_BG: [B, G].
        positive_BG: [B, G], bool. In a row that is all True any column may come out.
        draws_B: [B], uniform in [0, 1). The same numbers choose the same columns on every device and rank.

    Returns:
        [B], int64.
    """
    weights_BG = scores_BG.double().masked_fill(positive_BG, -math.inf).softmax(1).nan_to_num(0.0)
    cumulated_BG = weights_BG.cumsum(1)
    # fp64, so that a draw below 1 stays below the last sum and never lands behind the last column that has weight.
    places_B1 = draws_B.double()[:, None] * cumulated_BG[:, -1:]
    return torch.searchsorted(cumulated_BG, places_B1, right=True).squeeze(1).clamp_max(scores_BG.shape[1] - 1)


def gather_rows(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows of all ranks in the order of ranks: [G, ...] from [B, ...]. Differentiable: each rank's gradient for a
    row is added up at the rank that the row came from. Without a process group it is ``x``."""
    return x if _alone(group) else _GatherRows.apply(x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over ranks, on each of them. Differentiable: the gradients of all ranks are added up as well."""
    return x if _alone(group) else _SumOverRanks.apply(x, group)


def _alone(group: dist.ProcessGroup | None) -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1


# torch.distributed.nn.functional is deprecated, and the names of what replaces it (private ones) change with releases.
class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, x.shape[0]
        out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        _all_gather(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(ctx.rows, *grad.shape[1:])
        _reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=ctx.group)
        return out, None
