"""One step of the beam search against the loop over samples and torch.compile, on the CPU or a GPU."""

import pytest
import torch

from moe_zero.benchmarks.device import DEVICE, synchronize
from moe_zero.ops.beam_step import BeamStep, beam_step, beam_step_reference

ROUNDS = 100 if DEVICE == "cuda" else 30


def batched(scores, probs, k, routes):
    """The same in batched PyTorch with topk, which leaves the order of ties open."""
    B, J = scores.shape
    R = probs.shape[1]
    all_scores = (probs.view(B, J, R).log() + scores.log().unsqueeze(-1)).exp().flatten(1)
    best, index = all_scores.topk(k, dim=1)
    beam, expert = index // R, index % R
    grown = torch.cat([routes.take_along_dim(beam.unsqueeze(-1), 1), expert.unsqueeze(-1)], -1)
    return BeamStep(best, beam + torch.arange(B, device=beam.device).unsqueeze(1) * J, expert, grown)


RIVALS = {
    "ours": beam_step,
    "loop over samples": beam_step_reference,
    "batched": batched,
    "compiled batched": torch.compile(batched),
}


def run_once(run, *arguments):
    out = run(*arguments)
    synchronize()
    return out


@pytest.mark.parametrize(("samples", "beams", "experts"), [(4, 2, 2), (64, 7, 7)])
@pytest.mark.parametrize("rival", RIVALS)
def test_beam_step(benchmark, rival, samples, beams, experts):
    benchmark.group = f"beam_step, B={samples} J=K={beams} R={experts}, {DEVICE}"
    torch.manual_seed(0)
    scores = torch.rand(samples, beams, device=DEVICE)
    probs = torch.randn(samples * beams, experts, device=DEVICE).softmax(-1)
    routes = torch.randint(0, experts, (samples, beams, 3), device=DEVICE)
    arguments = (RIVALS[rival], scores, probs, beams, routes)
    assert torch.equal(run_once(*arguments).parents, run_once(beam_step_reference, *arguments[1:]).parents)
    benchmark.pedantic(run_once, args=arguments, rounds=ROUNDS, warmup_rounds=3)
