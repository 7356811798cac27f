"""One step of the beam search over experts: every beam of a sample is extended by every expert, the best are kept.

Legend of shape suffixes: B samples, J beams of a sample that enter, P = B * J, R experts, K beams that leave, L experts
on a route.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_zero.ops._library import (
    Operator,
    check_float,
    check_integer,
    check_integers,
    check_same_device,
    check_tensor,
    triton_kernels,
)

MAX_BEAMS = 4096
"""Beams that a step may keep: far more than any search is of use for, and few enough to fit in memory."""


class BeamStep(NamedTuple):
    """The K best extensions of each sample's beams, best first. Carries no gradient."""

    scores: Tensor
    """[B, K], fp32 (fp64 for fp64 probabilities): product of the probabilities on the route."""
    parents: Tensor
    """[B, K], int64: the row of the B * J beams (b * J + j) that each new beam descends from."""
    experts: Tensor
    """[B, K], int64: the expert that it took."""
    routes: Tensor
    """[B, K, L + 1], int64: its parent's route and that expert."""


def beam_step(parent_scores_BJ: Tensor | None, probs_PR: Tensor, k: int, routes_BJL: Tensor | None = None) -> BeamStep:
    """Keep the k best of each sample's J x R extensions.

    Args:
        parent_scores_BJ: [B, J], scores of the beams that enter; ``None`` in the first step, where J = 1 and the score
            is the probability itself.
        probs_PR: [B * J, R], the experts' probabilities for each beam.
        k: beams to keep. Where it exceeds J * R, the spare beams repeat the first ones with score 0, so that a real
            route replaces them as soon as there is one.
        routes_BJL: [B, J, L], the experts that each beam took; ``None`` in the first step.

    An extension scores exp(log p + log parent score). Equal scores keep the order of beams, then of experts, as a
    stable sort would; NaN counts as the largest score.

    Raises:
        ValueError: shapes that don't fit together, no beam, k outside of [1, 4096], scores without routes or routes
            without scores.
        TypeError: probabilities or scores that are not floats; k or routes that are not integers.
    """
    check_tensor(probs=probs_PR)
    check_float(probs=probs_PR, parent_scores=parent_scores_BJ)
    check_integers(routes=routes_BJL)
    check_integer(k=k)
    check_same_device(probs=probs_PR, parent_scores=parent_scores_BJ, routes=routes_BJL)
    if probs_PR.dim() != 2 or probs_PR.shape[1] == 0:
        raise ValueError(f"probs have shape {tuple(probs_PR.shape)}; they must be [B * J, R] with R at least 1")
    if not 1 <= k <= MAX_BEAMS:
        raise ValueError(f"k is {k}; it must be between 1 and {MAX_BEAMS} beams")
    if (parent_scores_BJ is None) != (routes_BJL is None):
        raise ValueError("parent_scores and routes belong together: give both, or neither in the first step")
    if parent_scores_BJ is not None:
        if parent_scores_BJ.dim() != 2 or parent_scores_BJ.numel() != probs_PR.shape[0]:
            raise ValueError(
                f"parent_scores have shape {tuple(parent_scores_BJ.shape)}; for probs of {probs_PR.shape[0]} beams "
                f"they must be [B, J] with B * J = {probs_PR.shape[0]}"
            )
        if parent_scores_BJ.shape[1] == 0:
            raise ValueError(f"parent_scores have shape {tuple(parent_scores_BJ.shape)}; at least one beam must enter")
        if routes_BJL.dim() != 3 or routes_BJL.shape[:2] != parent_scores_BJ.shape:
            raise ValueError(
                f"routes have shape {tuple(routes_BJL.shape)}; for parent_scores of shape "
                f"{tuple(parent_scores_BJ.shape)} they must be [B, J, L]"
            )
        parent_scores_BJ = parent_scores_BJ.detach()
    routes_BJL = None if routes_BJL is None else routes_BJL.long()
    return BeamStep(*_beam_step(parent_scores_BJ, probs_PR.detach(), k, routes_BJL))


def beam_step_reference(parent_scores_BJ, probs_PR, k, routes_BJL=None) -> BeamStep:
    """The definition of :func:`beam_step`, one sample after the other."""
    R = probs_PR.shape[1]
    J = 1 if parent_scores_BJ is None else parent_scores_BJ.shape[1]
    steps = []
    for b, probs_JR in enumerate(probs_PR.split(J)):
        score_JR = probs_JR if parent_scores_BJ is None else (probs_JR.log() + parent_scores_BJ[b, :, None].log()).exp()
        scores, best = score_JR.flatten().sort(descending=True, stable=True)
        scores = torch.cat([scores, scores.new_zeros(k)])[:k]
        best = torch.cat([best, torch.arange(k, device=best.device) % len(best)])[:k]
        parents, experts = best // R, best % R
        routes = experts[:, None] if routes_BJL is None else torch.cat([routes_BJL[b][parents], experts[:, None]], 1)
        steps.append((scores, b * J + parents, experts, routes))
    return BeamStep(*map(torch.stack, zip(*steps, strict=True)))


# The operator proper. Where the package is compiled, csrc/beam_step_cpu.cpp runs in place of the CPU function here.


def _beam_step_cpu(
    parent_scores_BJ: Tensor | None, probs_PR: Tensor, k: int, routes_BJL: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    P, R = probs_PR.shape
    J = 1 if parent_scores_BJ is None else parent_scores_BJ.shape[1]
    B, candidates = (P // J if J else 0), J * R
    scores_PR = probs_PR if probs_PR.dtype == torch.float64 else probs_PR.float()
    if parent_scores_BJ is not None:
        scores_PR = (scores_PR.log() + parent_scores_BJ.reshape(P, 1).to(scores_PR.dtype).log()).exp()
    scores_BC = scores_PR.reshape(B, candidates)
    if k > candidates:
        scores_BC = torch.nn.functional.pad(scores_BC, (0, k - candidates))
    # A stable sort, not topk: it alone promises the order of equal scores.
    scores_BC, best_BC = scores_BC.sort(dim=1, descending=True, stable=True)
    best_BK = best_BC[:, :k] % candidates
    beams_BK = best_BK // R
    experts_BK = best_BK - beams_BK * R
    routes_BKL = experts_BK.unsqueeze(-1)
    if routes_BJL is not None:
        routes_BKL = torch.cat([routes_BJL.long().take_along_dim(beams_BK.unsqueeze(-1), dim=1), routes_BKL], dim=-1)
    parents_BK = beams_BK + torch.arange(0, P, max(J, 1)).unsqueeze(1)
    return scores_BC[:, :k].contiguous(), parents_BK, experts_BK, routes_BKL.clone()


def _beam_step_cuda(parent_scores_BJ, probs_PR, k, routes_BJL):
    return triton_kernels("beam").beam_step(parent_scores_BJ, probs_PR, k, routes_BJL)


def _beam_step_fake(parent_scores_BJ, probs_PR, k, routes_BJL):
    B = probs_PR.shape[0] if parent_scores_BJ is None else parent_scores_BJ.shape[0]
    L = 0 if routes_BJL is None else routes_BJL.shape[2]
    dtype = torch.float64 if probs_PR.dtype == torch.float64 else torch.float32
    ids = [probs_PR.new_empty(shape, dtype=torch.int64) for shape in ((B, k), (B, k), (B, k, L + 1))]
    return probs_PR.new_empty(B, k, dtype=dtype), *ids


def _beam_step_fold(parent_scores_MBJ, probs_MPR, k, routes_MBJL):
    M, P = probs_MPR.shape[:2]
    rows = [None if t is None else t.flatten(0, 1) for t in (parent_scores_MBJ, probs_MPR, routes_MBJL)]
    results = _beam_step(*rows[:2], k, rows[2])
    scores, parents, experts, routes = (result.unflatten(0, (M, len(result) // M)) for result in results)
    return scores, parents - P * torch.arange(M, device=parents.device).view(M, 1, 1), experts, routes


_beam_step = Operator(
    "beam_step(Tensor? parent_scores, Tensor probs, int k, Tensor? routes) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_beam_step_fake,
    cuda=_beam_step_cuda,
    fallback=_beam_step_cpu,
    rows=(0, 1, 3),
    fold=_beam_step_fold,
)
