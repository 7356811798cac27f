import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from moe_zero.ops.beam_step import beam_step, beam_step_reference


def inputs(B, J, R, L, device="cpu", levels=None):
    """Scores, probabilities and routes; with ``levels``, probabilities of few distinct values, so that many tie."""
    generator = torch.Generator().manual_seed(B + 10 * J + 100 * R)
    probs = torch.rand(B * J, R, generator=generator)
    if levels:
        probs = (probs * levels).ceil() / levels
    routes = torch.randint(0, R, (B, J, L), generator=generator)
    scores = torch.full((B, J), 0.5) if levels else torch.rand(B, J, generator=generator)
    return scores.to(device), probs.to(device), routes.to(device)


def assert_same(out, expected):
    torch.testing.assert_close(out.scores, expected.scores, rtol=1e-6, atol=0)
    for name in ("parents", "experts", "routes"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize(("B", "J", "R", "L"), [(1, 1, 1, 1), (4, 2, 2, 1), (3, 2, 7, 5), (2, 7, 7, 2), (5, 3, 64, 3)])
def test_matches_reference(device, B, J, R, L, k):
    scores, probs, routes = inputs(B, J, R, L, device)
    assert_same(beam_step(scores, probs, k, routes), beam_step_reference(scores, probs, k, routes))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_first_step_ranks_the_probabilities_themselves(device, k):
    _, probs, _ = inputs(6, 1, 4, 1, device)
    out = beam_step(None, probs, k)
    assert_same(out, beam_step_reference(None, probs, k))
    assert torch.equal(out.scores, probs.sort(dim=1, descending=True).values[:, :k])
    assert out.routes.shape == (6, k, 1) and out.parents.tolist() == [[b] * k for b in range(6)]


def test_ties_keep_the_order_of_beams_then_experts(device):
    scores, probs, routes = inputs(20, 3, 8, 2, device, levels=3)
    assert_same(beam_step(scores, probs, 6, routes), beam_step_reference(scores, probs, 6, routes))
    out = beam_step(torch.ones(2, 2, device=device), torch.full((4, 3), 0.5, device=device), 4, routes[:2, :2])
    assert out.parents.tolist() == [[0, 0, 0, 1], [2, 2, 2, 3]] and out.experts.tolist() == [[0, 1, 2, 0]] * 2


def test_spare_beams_repeat_the_first_ones_with_score_zero(device):
    _, probs, _ = inputs(2, 1, 2, 1, device)
    out = beam_step(None, probs, 5)
    assert_same(out, beam_step_reference(None, probs, 5))
    assert torch.equal(out.scores[:, 2:], torch.zeros(2, 3, device=device))
    assert out.experts[:, 2:].tolist() == [[0, 1, 0]] * 2
    again = beam_step(out.scores, probs.repeat_interleave(5, 0), 2, out.routes)
    assert (again.scores > 0).all()


def test_nan_counts_as_the_largest_and_stays_in_its_sample(device):
    scores, probs, routes = inputs(3, 2, 4, 1, device)
    clean = beam_step(scores, probs, 3, routes)
    probs[2, 1] = float("nan")
    out = beam_step(scores, probs, 3, routes)
    assert out.experts[1, 0] == 1 and out.parents[1, 0] == 2 and out.scores[1, 0].isnan()
    for name in ("parents", "experts", "routes"):
        assert torch.equal(getattr(out, name)[[0, 2]], getattr(clean, name)[[0, 2]])
    assert out.experts.min() >= 0 and out.experts.max() < 4


def test_no_samples(device):
    out = beam_step(*inputs(0, 2, 3, 1, device)[:2], 2, torch.zeros(0, 2, 1, dtype=torch.int64, device=device))
    assert out.scores.shape == (0, 2) and out.routes.shape == (0, 2, 2)


def test_low_precision_probabilities_are_scored_in_fp32(device):
    scores, probs, routes = inputs(3, 2, 4, 1, device)
    out = beam_step(scores, probs.bfloat16(), 3, routes)
    assert out.scores.dtype == torch.float32
    assert_same(out, beam_step_reference(scores, probs.bfloat16().float(), 3, routes))
    with torch.autocast(device, torch.bfloat16):
        assert_same(beam_step(scores, probs, 3, routes), beam_step_reference(scores, probs, 3, routes))


def test_carries_no_gradient():
    scores, probs, routes = inputs(3, 2, 4, 1)
    out = beam_step(scores.requires_grad_(), probs.requires_grad_(), 2, routes)
    assert not any(t.requires_grad for t in out)


def test_strided_inputs(device):
    scores, probs, routes = inputs(3, 2, 4, 3, device)
    strided = scores.T.contiguous().T, probs.T.contiguous().T, 2, routes.movedim(2, 0).contiguous().movedim(0, 2)
    assert_same(beam_step(*strided), beam_step_reference(scores, probs, 2, routes))


def test_opcheck(device):
    scores, probs, routes = inputs(3, 2, 4, 1, device)
    opcheck(torch.ops.moe_zero.beam_step.default, (scores, probs, 2, routes))
    opcheck(torch.ops.moe_zero.beam_step.default, (None, probs, 2, None))


def test_compiles_whole_and_once_for_all_batch_sizes():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(beam_step, fullgraph=True, dynamic=True, backend=counter)
    for B in (5, 6, 50):
        scores, probs, routes = inputs(B, 2, 4, 1)
        assert_same(compiled(scores, probs, 2, routes), beam_step(scores, probs, 2, routes))
    assert counter.frame_count == 1


def test_errors_name_the_argument_and_its_value():
    scores, probs, routes = inputs(3, 2, 4, 1)
    with pytest.raises(ValueError, match="k is 0"):
        beam_step(scores, probs, 0, routes)
    with pytest.raises(ValueError, match=r"parent_scores have shape \(3, 1\); for probs of 6 beams"):
        beam_step(scores[:, :1], probs, 2, routes)
    with pytest.raises(ValueError, match=r"routes have shape \(2, 2, 1\)"):
        beam_step(scores, probs, 2, routes[:2])
    with pytest.raises(ValueError, match="belong together"):
        beam_step(scores, probs, 2)
    with pytest.raises(TypeError, match=r"probs has dtype torch.int64"):
        beam_step(scores, probs.long(), 2, routes)
