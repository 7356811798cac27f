"""Experts routed token by token."""

import copy

import pytest
import torch

from moe_zero.layers import Experts, TokenMoE, balancing_loss
from moe_zero.layers.token import token_moe_reference

D, F = 12, 20


@pytest.mark.parametrize("tokens", [0, 1, 17, 64])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (4, 2), (7, 7)])
@pytest.mark.parametrize(
    "options", [{}, {"renormalize": False}, {"shared_expert": True}, {"stacked": True, "bias": False}]
)
def test_equals_the_reference(tokens, experts, top_k, options):
    layer = TokenMoE(D, F, experts, top_k, dtype=torch.float64, **options)
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    outputs = [layer(x), token_moe_reference(layer, x)]
    torch.testing.assert_close(*outputs)
    weight = torch.randn(tokens, D, dtype=torch.float64)
    grads = [torch.autograd.grad((y * weight).sum(), inputs, materialize_grads=True) for y in outputs]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(3, 5, D), (2, 3, 4, D), (5, D), (0, 5, D)])
def test_a_sequence_goes_one_way(shape):
    layer = TokenMoE(D, F, 4, 2, granularity="sequence", dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x), token_moe_reference(layer, x))
    assert layer.routing.ids.shape == (x.numel() // (shape[-2] * D), 2)
    layer.loss("switch").backward()


def test_any_leading_shape_and_strides():
    layer = TokenMoE(D, F, 4, 2)
    x = torch.randn(5, D, 3).transpose(1, 2)
    expected = layer(x.reshape(-1, D)).view(5, 3, D)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("source", [False, True], ids=["separate", "stacked"])
def test_stacked_and_separate_weights_load_into_each_other(source):
    a, b = TokenMoE(D, F, 3, 2, stacked=source), TokenMoE(D, F, 3, 2, stacked=not source)
    b.load_state_dict(a.state_dict())
    x = torch.randn(9, D)
    torch.testing.assert_close(b(x), a(x))
    again = TokenMoE(D, F, 3, 2, stacked=source)
    again.load_state_dict(b.state_dict())
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_checkpoint_with_another_number_of_experts_is_refused():
    with pytest.raises(RuntimeError, match="experts"):
        TokenMoE(D, F, 3, 2).load_state_dict(TokenMoE(D, F, 4, 2, stacked=True).state_dict())


def test_experts_can_be_called_one_by_one():
    separate, stacked = Experts(D, F, 3), Experts(D, F, 3, stacked=True)
    stacked.load_state_dict(separate.state_dict())
    x = torch.randn(4, D)
    for one, other in zip(separate, stacked, strict=True):
        torch.testing.assert_close(one(x), other(x))
    torch.testing.assert_close(separate[-1](x), separate[2](x))
    with pytest.raises(IndexError):
        separate[3]


def test_losses_of_balanced_and_collapsed_routing():
    layer = TokenMoE(D, F, 4, 1)
    with torch.no_grad():
        layer.gate.weight.zero_()
    layer(torch.randn(40, D))
    assert layer.loss("importance").item() == pytest.approx(0.0, abs=1e-9)
    assert layer.loss("switch").item() == pytest.approx(1.0)
    assert layer.loss("z").item() == pytest.approx(torch.tensor(4.0).log().square().item())
    with torch.no_grad():
        layer.gate.weight[2] = 100.0
    layer(torch.rand(40, D) + 1)
    assert layer.loss("switch").item() == pytest.approx(4.0, rel=1e-4)
    assert layer.loss("importance").item() == pytest.approx(4.0, rel=1e-4)  # variance 400, mean 10


@pytest.mark.parametrize("kind", ["switch", "importance", "z"])
def test_a_loss_reaches_the_gate(kind):
    layer = TokenMoE(D, F, 4, 2)
    layer(torch.randn(8, D))
    balancing_loss(layer, kind).backward()
    assert layer.gate.weight.grad.abs().sum() > 0


def test_without_tokens_every_loss_is_zero():
    layer = TokenMoE(D, F, 4, 2)
    layer(torch.randn(0, D))
    assert [layer.loss(kind).item() for kind in ("switch", "importance", "z")] == [0.0, 0.0, 0.0]


def test_compiles_whole_and_for_any_number_of_tokens():
    layer = TokenMoE(D, F, 4, 2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 9, 33):
            x = torch.randn(tokens, D)
            torch.testing.assert_close(compiled(x), layer(x))


def test_a_layer_that_has_run_can_be_copied():
    layer = TokenMoE(D, F, 4, 2)
    x = torch.randn(5, D)
    expected = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="top_k is 5; it must be between 1 and num_experts, 4"):
        TokenMoE(D, F, 4, 5)
    with pytest.raises(ValueError, match="num_experts is 0"):
        TokenMoE(D, F, 0, 1)
    with pytest.raises(ValueError, match="granularity is 'word'"):
        TokenMoE(D, F, 4, 2, granularity="word")
    with pytest.raises(ValueError, match="kind is 'load'; it must be one of 'switch', 'importance', 'z'"):
        TokenMoE(D, F, 4, 2).loss("load")
    with pytest.raises(RuntimeError, match="routed nothing yet"):
        TokenMoE(D, F, 4, 2).loss()
    with pytest.raises(ValueError, match="none of its modules is a TokenMoE"):
        balancing_loss(torch.nn.Linear(2, 2))
