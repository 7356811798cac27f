"""Retrieval: captions for pictures and pictures for captions, with what chance would reach beside it.

Legend of shape suffixes: I picture crops, K captions, Q queries of a crop, C contrastive width, L routed layers, N
queries of a search, M its candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from moe_zero.qformer.objectives import best_query_similarity
from moe_zero.recipes.processes import Processes

BATCH = 16
"""Crops or captions that one process embeds at once."""


@dataclass(frozen=True)
class Direction:
    """One direction of retrieval; shares from 0 to 1."""

    r1: float
    r5: float
    chance_r1: float
    chance_r5: float
    queries: int
    candidates: int


@dataclass(frozen=True)
class Retrieval:
    """What an evaluation found."""

    image_to_text: Direction
    text_to_image: Direction
    scores_IK: Tensor
    """Cosine similarities, fp32."""
    image_owner_I: Tensor
    """Number of the picture that each crop is of."""
    text_owner_K: Tensor
    routes_IL: Tensor | None
    """Experts that each crop took; ``None`` in a dense model."""

    def figures(self) -> dict:
        """The two directions as plain values."""
        return {"image_to_text": asdict(self.image_to_text), "text_to_image": asdict(self.text_to_image)}


@torch.no_grad()
def retrieve(
    model: nn.Module,
    image: Callable[[int], Tensor],
    image_owner_I: Tensor,
    captions: tuple[Tensor, Tensor],
    text_owner_K: Tensor,
    processes: Processes,
    *,
    autocast: Callable,
    rerank: int = 0,
) -> Retrieval:
    """Embed crops and captions, the work divided over the processes, and search in both directions.

    Args:
        model: a `QFormerPretraining`, or a sharded one.
        image: crop number to its features [P, W], fp32.
        image_owner_I, text_owner_K: which picture each crop and each caption belongs to; a hit is one of the same
        picture.
        captions: ids and mask, [K, T] each.
        autocast: a function that makes the context the model runs in.
        rerank: order the best ``rerank`` candidates of every query again by the matching head.
    """
    device = processes.device
    ids_KT, mask_KT = captions
    with autocast():
        image_IQC, routes_IL = embed_images(model, image, len(image_owner_I), processes)
        text_KC = embed_texts(model, captions, processes)
    scores_IK = similarity(image_IQC, text_KC)
    to_text, to_image = scores_IK, scores_IK.T
    if rerank:

        def match(pairs: list[tuple[int, int]]) -> Tensor:
            features = torch.stack([image(number) for number, _ in pairs]).to(device)
            texts = [text for _, text in pairs]
            return model(features, ids_KT[texts].to(device), mask_KT[texts].to(device), task="match")

        with autocast():
            to_text = _reranked(scores_IK, rerank, match, processes)
            to_image = _reranked(scores_IK.T, rerank, lambda pairs: match([(i, k) for k, i in pairs]), processes)
    image_owner, text_owner = image_owner_I.to(device), text_owner_K.to(device)
    positive_IK = image_owner[:, None] == text_owner[None, :]
    return Retrieval(
        image_to_text=recall(to_text, positive_IK),
        text_to_image=recall(to_image, positive_IK.T),
        scores_IK=scores_IK.cpu(),
        image_owner_I=image_owner_I,
        text_owner_K=text_owner_K,
        routes_IL=None if routes_IL is None else routes_IL.cpu(),
    )


@torch.no_grad()
def embed_images(
    model: nn.Module, image: Callable[[int], Tensor], count: int, processes: Processes
) -> tuple[Tensor, Tensor | None]:
    """Queries [I, Q, C] and routes [I, L] of crops 0 to ``count``; every process does a share and gets all.

    Args:
        image: crop number to its features [P, W], fp32.
    """
    num_queries = num_layers = 0

    def embed(numbers: list[int]) -> Tensor:
        nonlocal num_queries, num_layers
        features = torch.stack([image(number) for number in numbers]).to(processes.device)
        queries_BQC, route_BL = model(image_features=features, task="images")
        num_queries = queries_BQC.shape[1]
        if route_BL is None:
            return queries_BQC.flatten(1)
        # The route travels behind the numbers of the embedding, so that there is one gather.
        num_layers = route_BL.shape[1]
        return torch.cat([queries_BQC.flatten(1), route_BL.float()], dim=1)

    rows = divided(embed, count, processes)
    image_IQC = rows[:, : rows.shape[1] - num_layers].unflatten(1, (num_queries, -1))
    return image_IQC, rows[:, -num_layers:].long() if num_layers else None


@torch.no_grad()
def embed_texts(model: nn.Module, captions: tuple[Tensor, Tensor], processes: Processes) -> Tensor:
    """First rows of captions, [K, C]; every process does a share and gets all.

    Args:
        captions: ids and mask, [K, T] each.
    """

    def embed(numbers: list[int]) -> Tensor:
        ids_BT, mask_BT = (part[numbers].to(processes.device) for part in captions)
        return model(input_ids=ids_BT, attention_mask=mask_BT, task="texts")

    return divided(embed, len(captions[0]), processes)


def similarity(image_IQC: Tensor, text_KC: Tensor) -> Tensor:
    """Cosine of each caption with the query that fits it best, [I, K], in pieces that fit into memory."""
    return torch.cat([best_query_similarity(part_IQC, text_KC) for part_IQC in image_IQC.split(64)])


def recall(scores_NM: Tensor, positive_NM: Tensor) -> Direction:
    """Share of searches with a right candidate first, and among the first five.

    Candidates with equal scores count as if the wrong ones came first. Chance is that of a random order, averaged
    over the searches: ``1 - C(M - m, k) / C(M, k)`` with m right ones among M candidates.

    Raises:
        ValueError: a search has no right candidate.
    """
    right_N = positive_NM.sum(1)
    if not bool((right_N > 0).all()):
        raise ValueError(f"search {int((right_N == 0).nonzero()[0])} has no right candidate; every row needs one")
    best_right_N1 = scores_NM.masked_fill(~positive_NM, -math.inf).amax(1, keepdim=True)
    ahead_N = ((scores_NM >= best_right_N1) & ~positive_NM).sum(1)
    searches, candidates = scores_NM.shape

    def chance(k: int) -> float:
        k = min(k, candidates)
        counts = right_N.tolist()
        return sum(1 - math.comb(candidates - m, k) / math.comb(candidates, k) for m in counts) / searches

    return Direction(
        r1=(ahead_N < 1).double().mean().item(),
        r5=(ahead_N < 5).double().mean().item(),
        chance_r1=chance(1),
        chance_r5=chance(5),
        queries=searches,
        candidates=candidates,
    )


def divided(
    function: Callable[[list], Tensor], items: int | Sequence, processes: Processes, batch: int = BATCH
) -> Tensor:
    """``function`` on batches of numbers (or of items), each process its share; all rows at every process, in order.

    All processes call the function equally often, since a sharded model gathers its weights in every call: the last
    ones repeat their last item, and the repetitions are dropped.
    """
    items = list(range(items)) if isinstance(items, int) else list(items)
    share = math.ceil(len(items) / processes.world_size)
    mine = [items[min(processes.rank * share + offset, len(items) - 1)] for offset in range(share)]
    rows = torch.cat([function(mine[start : start + batch]) for start in range(0, share, batch)])
    return processes.concatenated(rows.float())[: len(items)]


def _reranked(scores_NM: Tensor, best: int, match: Callable, processes: Processes) -> Tensor:
    """The scores with the ``best`` of each row replaced by matching logits, lifted above all others."""
    top_NB = scores_NM.topk(min(best, scores_NM.shape[1]), dim=1).indices
    pairs = [(row, column) for row, columns in enumerate(top_NB.tolist()) for column in columns]
    logits_NB = divided(match, pairs, processes).view_as(top_NB)
    # Sigmoid is between 0 and 1 and cosines are at most 1, so 2 + sigmoid keeps every reranked candidate in front.
    return scores_NM.scatter(1, top_NB, 2 + logits_NB.double().sigmoid().to(scores_NM.dtype))
