"""Experts routed by beam search, on the CPU or a GPU: one step of the search, the choice of experts by what they
produce, and the whole routed layer, each against what published code does and against batched PyTorch.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_zero.benchmarks.device import DEVICE, expert_parameters, forward, forward_backward
from moe_zero.layers import BeamMoE
from moe_zero.layers.beam import BeamState
from moe_zero.ops.beam_step import BeamStep, beam_step, beam_step_reference
from moe_zero.ops.post_route import post_route_logits, post_route_outputs

HIDDEN, WIDTH = (768, 3072) if DEVICE == "cuda" else (384, 1536)
EXPERTS, QUERIES = 8, 32
ROUNDS = 100 if DEVICE == "cuda" else 15


MODES = {"forward": forward, "forward + backward": forward_backward}


def batched(scores, probs, k, routes):
    """The step in batched PyTorch with topk, which leaves the order of ties open."""
    B, J = scores.shape
    R = probs.shape[1]
    all_scores = (probs.view(B, J, R).log() + scores.log().unsqueeze(-1)).exp().flatten(1)
    best, index = all_scores.topk(k, dim=1)
    beam, expert = index // R, index % R
    grown = torch.cat([routes.take_along_dim(beam.unsqueeze(-1), 1), expert.unsqueeze(-1)], -1)
    return BeamStep(best, beam + torch.arange(B, device=beam.device).unsqueeze(1) * J, expert, grown)


STEPS = {
    "ours": beam_step,
    "loop over samples": beam_step_reference,
    "batched": batched,
    "compiled batched": torch.compile(batched),
}


@pytest.mark.parametrize(("samples", "beams", "experts"), [(4, 2, 2), (64, 7, 7)])
@pytest.mark.parametrize("rival", STEPS)
def test_beam_step(benchmark, rival, samples, beams, experts):
    benchmark.group = f"beam_step, B={samples} J=K={beams} R={experts}, {DEVICE}"
    torch.manual_seed(0)
    scores = torch.rand(samples, beams, device=DEVICE)
    probs = torch.randn(samples * beams, experts, device=DEVICE).softmax(-1)
    routes = torch.randint(0, experts, (samples, beams, 3), device=DEVICE)
    arguments = (STEPS[rival], scores, probs, beams, routes)
    assert torch.equal(forward(*arguments).parents, forward(beam_step_reference, *arguments[1:]).parents)
    benchmark.pedantic(forward, args=arguments, rounds=2 * ROUNDS, warmup_rounds=3)


def post_route(x_GQD, gate_D, w1, b1, w2, b2):
    """Logits from the first product; the second for the best two experts of each group alone."""
    logits, hidden = post_route_logits(x_GQD, gate_D, w1, b1, w2, b2)
    p, experts = logits.softmax(-1).topk(2)
    groups = torch.arange(len(x_GQD), device=x_GQD.device).repeat_interleave(2)
    return post_route_outputs(hidden, groups, experts.flatten(), p.flatten(), w2, b2)


def all_second_products(x_GQD, gate_D, w1, b1, w2, b2):
    """Every expert to its end, then the choice."""
    y = torch.stack([F.linear(F.gelu(F.linear(x_GQD, *e[:2])), *e[2:]) for e in zip(w1, b1, w2, b2, strict=True)], 1)
    p, experts = (y.mean(2) @ gate_D).softmax(-1).topk(2)
    chosen = y.take_along_dim(experts[:, :, None, None], 1) * p[:, :, None, None]
    return chosen.flatten(0, 1)


POST_ROUTES = {"ours": post_route, "all second products": all_second_products}


@pytest.mark.parametrize("rival", POST_ROUTES)
@pytest.mark.parametrize("mode", MODES)
def test_post_route(benchmark, rival, mode):
    groups = 16
    benchmark.group = f"post-route {mode}, {groups} groups of {QUERIES} rows, E={EXPERTS}, best 2, fp32, {DEVICE}"
    torch.manual_seed(0)
    params = expert_parameters(EXPERTS, HIDDEN, WIDTH)
    x = torch.randn(groups, QUERIES, HIDDEN, device=DEVICE, requires_grad=True)
    gate = torch.randn(HIDDEN, device=DEVICE, requires_grad=True)
    arguments = (x, gate, *params)
    expected = all_second_products(*arguments)
    run = POST_ROUTES[rival]
    assert (run(*arguments) - expected).norm() < 1e-4 * expected.norm()
    benchmark.pedantic(MODES[mode], args=(run, *arguments), rounds=ROUNDS, warmup_rounds=2)


def published_layer(layer: BeamMoE, beams: BeamState, step=beam_step_reference):
    """The routed layer as published: every expert to its end on every row, then the search, sample by sample."""

    def run(x_MQD):
        rows = x_MQD.unflatten(0, (-1, layer.num_beams))
        routed = rows[:, :-1].flatten(0, 1)
        outputs = torch.stack([expert(routed) for expert in layer.experts][:-1], dim=1)
        p = layer.gate(outputs.mean(2)).squeeze(-1).softmax(-1)
        parents, experts = step(beams.scores, p.detach(), layer.num_beams - 1, beams.routes)[1:3]
        place = (parents.flatten(), experts.flatten())
        chosen = p[place][:, None, None] * outputs[place]
        return torch.cat([chosen.unflatten(0, parents.shape), layer.experts[-1](rows[:, -1:])], 1)

    return run


LAYERS = {
    "ours": lambda layer, beams: lambda x_MQD: layer(x_MQD, beams).hidden,
    "published": published_layer,
    "compiled batched": lambda layer, beams: torch.compile(published_layer(layer, beams, batched)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rival", LAYERS)
def test_layer(benchmark, rival, mode):
    samples, beams = 4, EXPERTS
    benchmark.group = (
        f"BeamMoE {mode}, {samples} samples of {beams} beams, {QUERIES} rows each, E={EXPERTS}, fp32, {DEVICE}"
    )
    torch.manual_seed(0)
    layer = BeamMoE(HIDDEN, WIDTH, EXPERTS, beams).to(DEVICE)
    x = torch.randn(samples * beams, QUERIES, HIDDEN, device=DEVICE, requires_grad=True)
    shape = (samples, beams - 1)
    state = BeamState(
        torch.rand(shape, device=DEVICE).sort(descending=True).values,
        torch.randint(0, EXPERTS - 1, (*shape, 1), device=DEVICE),
        torch.zeros(shape, dtype=torch.int64, device=DEVICE),
    )
    run, reference = (LAYERS[name](layer, state) for name in (rival, "published"))
    expected = reference(x)
    assert (run(x) - expected).norm() < 1e-4 * expected.norm()
    benchmark.pedantic(MODES[mode], args=(run, x), setup=layer.zero_grad, rounds=ROUNDS, warmup_rounds=2)
