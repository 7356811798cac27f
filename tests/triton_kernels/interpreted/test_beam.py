import pytest
import torch

from moe_zero.ops.beam_step import beam_step_reference
from moe_zero.triton_kernels.beam import beam_step


def inputs(B, J, R, L):
    torch.manual_seed(B + J + R)
    return torch.rand(B, J), torch.rand(B * J, R).softmax(-1), torch.randint(0, R, (B, J, L))


def assert_same(out, expected):
    torch.testing.assert_close(out[0], expected.scores, rtol=1e-6, atol=0)
    for actual, wanted in zip(out[1:], expected[1:], strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize(("B", "J", "R", "L"), [(1, 1, 1, 1), (4, 2, 2, 1), (3, 2, 7, 5), (5, 3, 64, 3)])
def test_matches_reference(B, J, R, L, k):
    scores, probs, routes = inputs(B, J, R, L)
    assert_same(beam_step(scores, probs, k, routes), beam_step_reference(scores, probs, k, routes))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_first_step(k):
    _, probs, _ = inputs(5, 1, 4, 1)
    assert_same(beam_step(None, probs, k, None), beam_step_reference(None, probs, k))


def test_ties_keep_the_order_of_beams_then_experts():
    scores, probs, routes = inputs(20, 3, 8, 2)
    scores, probs = torch.full_like(scores, 0.5), (probs * 20).ceil() / 20
    assert_same(beam_step(scores, probs, 6, routes), beam_step_reference(scores, probs, 6, routes))


def test_nan_counts_as_the_largest_and_stays_in_its_sample():
    scores, probs, routes = inputs(3, 2, 4, 1)
    clean = beam_step(scores, probs, 3, routes)
    probs[2, 1] = float("nan")
    out = beam_step(scores, probs, 3, routes)
    assert out[2][1, 0] == 1 and out[1][1, 0] == 2 and out[2].max() < 4
    for actual, wanted in zip(out[1:], clean[1:], strict=True):
        assert torch.equal(actual[[0, 2]], wanted[[0, 2]])


def test_strided_inputs():
    scores, probs, routes = inputs(3, 2, 4, 3)
    strided = scores.T.contiguous().T, probs.T.contiguous().T, 2, routes.movedim(2, 0).contiguous().movedim(0, 2)
    assert_same(beam_step(*strided), beam_step_reference(scores, probs, 2, routes))


def test_no_samples():
    assert beam_step(torch.zeros(0, 2), torch.zeros(0, 3), 2, torch.zeros(0, 2, 1).long())[3].shape == (0, 2, 2)
