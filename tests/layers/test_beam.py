"""Experts routed by beam search."""

import pytest
import torch

from moe_zero.layers import BeamMoE, importance_loss
from moe_zero.layers.beam import BeamState

B, Q, D, F = 3, 5, 12, 20


def layer(experts=4, beams=3, **options) -> BeamMoE:
    moe = BeamMoE(D, F, experts, beams, dtype=torch.float64, **options)
    with torch.no_grad():
        moe.gate.weight.normal_()
    return moe


def rows(count) -> torch.Tensor:
    return torch.randn(count, Q, D, dtype=torch.float64, requires_grad=True)


def entering(k=2, passed=2) -> BeamState:
    scores = torch.rand(B, k, dtype=torch.float64).sort(descending=True).values
    routes = torch.randint(3, (B, k, passed))
    return BeamState(scores, routes, torch.zeros(B, k, dtype=torch.int64))


@pytest.mark.parametrize("weight_type", ["ffn_prob", "scaled_prob", "one_hot"])
@pytest.mark.parametrize("routing", ["post_route", "pre_route"])
def test_outputs_are_those_of_the_experts_on_the_route(routing, weight_type):
    moe = layer(routing=routing, weight_type=weight_type)
    x, beams = rows(B * 3), entering()
    out = moe(x, beams)
    y = torch.stack([expert(x) for expert in moe.experts], dim=1)  # [B * N, E, Q, D]
    source = x if routing == "pre_route" else None
    for b in range(B):
        for place in range(2):
            row = b * 3 + out.beams.parents[b, place]
            expert = out.beams.routes[b, place, -1]
            if routing == "pre_route":
                logits = moe.gate.weight @ source[row].mean(0)
            else:
                logits = y[row, :3].mean(1) @ moe.gate.weight[0]
            p = logits.softmax(0)[expert]
            weight = {"ffn_prob": p, "scaled_prob": 3 * p, "one_hot": 1.0}[weight_type]
            torch.testing.assert_close(out.hidden[b, place], weight * y[row, expert])
            torch.testing.assert_close(out.beams.scores[b, place], p * beams.scores[b, out.beams.parents[b, place]])
            assert torch.equal(out.beams.routes[b, place, :-1], beams.routes[b, out.beams.parents[b, place]])
        torch.testing.assert_close(out.hidden[b, 2], y[b * 3 + 2, 3])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("routing", ["post_route", "pre_route"])
def test_gradients(routing, stacked):
    moe = layer(routing=routing, stacked=stacked)
    x, beams = rows(B * 3), entering()
    parameters = list(moe.parameters())

    def run(x, *_):
        out = moe(x, beams)
        return out.hidden, out.importance

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_stacked_weights_load_separate_ones():
    separate, stacked = layer(), layer(stacked=True)
    stacked.load_state_dict(separate.state_dict())
    x = rows(B)
    torch.testing.assert_close(stacked(x).hidden, separate(x).hidden)


def test_best_beams_come_first_and_do_not_repeat():
    out = layer(experts=6, beams=5)(rows(B * 5), entering(k=4))
    assert (out.beams.scores.diff(dim=1) <= 0).all()
    extensions = out.beams.parents * 5 + out.beams.routes[..., -1]
    assert all(len(set(sample.tolist())) == 4 for sample in extensions)


def test_spare_beams_have_score_zero_and_give_way():
    moe = layer(experts=3, beams=6)  # 5 routed beams, 2 routed experts
    x = rows(B)
    first = moe(x)
    assert (first.beams.scores[:, :2] > 0).all()
    assert (first.beams.scores[:, 2:] == 0).all()
    second = moe(first.hidden.flatten(0, 1), first.beams)
    assert ((second.beams.scores > 0).sum(1) == 4).all()


def test_with_dropout_the_published_gate_sees_what_dropout_left():
    moe = layer(dropout=0.5, weight_type="one_hot")
    x = rows(B)
    torch.manual_seed(0)
    expected = moe(x)
    torch.manual_seed(0)
    y = torch.stack([moe.experts[e](x) for e in range(3)], dim=1)
    logits = (y.mean(2) * moe.gate.weight[0]).sum(-1)
    torch.testing.assert_close(expected.importance, logits.softmax(-1).sum(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(expected.hidden[0, 0], y[0, expected.beams.routes[0, 0, 0]])


@pytest.mark.parametrize("options", [{"gate_sees_dropout": False}, {"routing": "pre_route"}])
def test_a_gate_before_dropout_routes_as_in_evaluation(options):
    moe = layer(dropout=0.5, **options)
    x = rows(B)
    training = moe(x)
    assert (training.hidden == 0).double().mean() > 0.3
    moe.eval()
    torch.testing.assert_close(moe(x).importance, training.importance)
    assert torch.equal(moe(x).beams.routes, training.beams.routes)


def test_importance_loss_is_zero_when_balanced_and_for_one_expert():
    assert importance_loss(torch.full((3,), 7.0)) == 0
    assert importance_loss(torch.tensor([7.0])) == 0
    assert importance_loss(torch.zeros(3)) == 0
    torch.testing.assert_close(importance_loss(torch.tensor([1.0, 3.0])), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 1}, "num_experts is 1; beam routing needs at least 2"),
        ({"beams": 1}, "num_beams is 1; beam routing needs at least 2"),
        ({"routing": "mid"}, "routing is 'mid'; it must be one of 'post_route', 'pre_route'"),
        ({"weight_type": "p"}, "weight_type is 'p'"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        layer(**change)
