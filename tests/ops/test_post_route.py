import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from moe_zero.ops.post_route import post_route_logits, post_route_outputs, post_route_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(out, reference):
    out, reference = out.double().cpu(), reference.double().cpu()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def inputs(G, Q, D, F, E, S, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(G + Q + E)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype).requires_grad_()

    x, gate = normal(G, Q, D), normal(1, D)
    params = normal(E, F, D, scale=D**-0.5), normal(E, F), normal(E, D, F, scale=F**-0.5), normal(E, D)
    pairs = torch.randperm(G * E, generator=generator)[:S].to(device)
    weights = torch.rand(S, generator=generator).to(device).requires_grad_()
    return x, gate, weights, params, (pairs // E, pairs % E)


def run(x, gate, weights, params, pairs, **kwargs):
    w1, b1, w2, b2 = params
    logits, hidden = post_route_logits(x, gate, w1, b1, w2, b2, **kwargs)
    return logits, post_route_outputs(hidden, *pairs, weights, w2, b2, **kwargs)


def reference(x, gate, weights, params, pairs, **kwargs):
    logits, y_EGQD = post_route_reference(x, gate, *params, **kwargs)
    groups, experts = pairs
    chosen = y_EGQD[experts, groups]
    return logits, chosen if weights is None else chosen * weights[:, None, None]


def check(x, gate, weights, params, pairs, use=("logits", "outputs"), **kwargs):
    def double(t):
        return None if t is None else t.detach().cpu().double().requires_grad_()

    x64, gate64, weights64, params64 = double(x), double(gate), double(weights), [double(p) for p in params]
    results = run(x, gate, weights, params, pairs, **kwargs)
    expected = reference(x64, gate64, weights64, params64, [p.cpu() for p in pairs], **kwargs)
    tolerance = TOLERANCE[x.dtype]
    for name, out, ref in zip(("logits", "outputs"), results, expected, strict=True):
        assert out.shape == ref.shape and relative_error(out, ref) < tolerance, name
    chosen = [i for i, name in enumerate(("logits", "outputs")) if name in use]
    grads = [torch.randn(expected[i].shape, generator=torch.Generator().manual_seed(i)) for i in chosen]
    leaves, leaves64 = [], []
    for leaf, leaf64 in zip((x, gate, weights, *params), (x64, gate64, weights64, *params64), strict=True):
        if leaf is not None:
            leaves.append(leaf)
            leaves64.append(leaf64)
    options = {"allow_unused": True, "materialize_grads": True}
    own_grads = [g.to(results[i]) for g, i in zip(grads, chosen, strict=True)]
    actual = torch.autograd.grad([results[i] for i in chosen], leaves, own_grads, **options)
    wanted = torch.autograd.grad([expected[i] for i in chosen], leaves64, [g.double() for g in grads], **options)
    for a, w, leaf in zip(actual, wanted, leaves, strict=True):
        assert a.dtype == leaf.dtype
        assert relative_error(a, w) < tolerance * (3 if a.numel() < 64 else 1), tuple(leaf.shape)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("G", "Q", "D", "F", "E", "S"),
    [(1, 1, 8, 8, 1, 1), (4, 5, 24, 40, 3, 6), (7, 32, 33, 47, 7, 14), (2, 3, 16, 24, 8, 0)],
)
def test_matches_reference(device, dtype, G, Q, D, F, E, S):
    check(*inputs(G, Q, D, F, E, S, dtype, device))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("with_weights", [True, False])
def test_options(device, approximate, with_weights):
    x, gate, weights, params, pairs = inputs(4, 5, 24, 40, 3, 6, device=device)
    check(x, gate, weights if with_weights else None, params, pairs, approximate=approximate)


def test_without_biases_is_with_biases_of_zero(device):
    x, gate, weights, (w1, b1, w2, b2), pairs = inputs(4, 5, 24, 40, 3, 6, device=device)
    leaves = [x, gate, weights, w1, w2]
    results = []
    for first, second in ((None, None), (torch.zeros_like(b1), torch.zeros_like(b2))):
        out = run(x, gate, weights, (w1, first, w2, second), pairs)
        results.append([*out, *torch.autograd.grad(squares(out), leaves)])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5


def squares(results):
    return sum(result.square().sum() for result in results)


@pytest.mark.parametrize("use", [("logits",), ("outputs",)])
def test_gradient_of_one_result_alone(device, use):
    check(*inputs(4, 5, 24, 40, 3, 6, device=device), use=use)


def test_pair_chosen_twice_adds_its_gradients(device):
    x, gate, weights, params, (groups, experts) = inputs(4, 5, 24, 40, 3, 6, device=device)
    groups, experts = groups.clone(), experts.clone()
    groups[1:3], experts[1:3] = groups[0], experts[0]
    check(x, gate, weights, params, (groups, experts))


def test_expert_that_is_never_chosen_gets_no_gradient_from_the_outputs(device):
    x, gate, weights, params, (groups, experts) = inputs(4, 5, 24, 40, 3, 6, device=device)
    _, outputs = run(x, gate, weights, params, (groups, torch.where(experts == 1, 2, experts)))
    outputs.sum().backward()
    assert all(torch.equal(p.grad[1], torch.zeros_like(p.grad[1])) for p in params)


def test_parameters_of_separate_experts_need_no_stacking(device):
    x, gate, weights, params, pairs = inputs(4, 5, 24, 40, 3, 6, device=device)
    separate = [[t.detach().clone().requires_grad_() for t in p] for p in params]
    results, expected = run(x, gate, weights, separate, pairs), run(x, gate, weights, params, pairs)
    for a, b in zip(results, expected, strict=True):
        assert relative_error(a, b) < 1e-6
    squares(results).backward()
    grads = torch.autograd.grad(squares(expected), params)
    for tensors, grad in zip(separate, grads, strict=True):
        assert relative_error(torch.stack([t.grad for t in tensors]), grad) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_the_logits_in_fp32(device, dtype):
    given = inputs(4, 5, 24, 40, 3, 6, device=device)
    with torch.autocast(device, dtype):
        logits, outputs = run(*given)
    assert logits.dtype == torch.float32 and outputs.dtype == dtype
    for a, b in zip((logits, outputs), reference(*given), strict=True):
        assert relative_error(a, b) < 1e-2
    (logits.sum() + outputs.sum()).backward()
    assert all(p.grad.dtype == torch.float32 for p in given[3])


def test_same_bits_from_run_to_run(device):
    x, gate, weights, params, pairs = inputs(7, 32, 33, 47, 7, 14, device=device)
    leaves = [x, gate, weights, *params]
    grads = [torch.autograd.grad(squares(run(x, gate, weights, params, pairs)), leaves) for _ in range(3)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_gradcheck():
    x, gate, weights, params, pairs = inputs(3, 2, 4, 5, 3, 4)
    leaves = [t.detach().double().requires_grad_() for t in (x, gate, weights, *params)]
    assert torch.autograd.gradcheck(lambda x, g, w, *p: run(x, g, w, p, pairs), leaves)


@pytest.mark.parametrize("separate", [False, True])
def test_opcheck(device, separate):
    x, _, weights, params, (groups, experts) = inputs(3, 2, 8, 12, 3, 4, device=device)
    w1, b1, w2, b2 = ([t.detach().requires_grad_() for t in p] if separate else [p] for p in params)
    folded = torch.randn(3, 12, device=device, requires_grad=True)
    opcheck(torch.ops.moe_zero.post_route_up.default, (x.flatten(0, 1), 2, w1, b1, folded, False))
    hidden = torch.randn(3, 3, 2, 12, device=device, requires_grad=True)
    opcheck(torch.ops.moe_zero.post_route_down.default, (hidden, groups, experts, weights, w2, b2, False))


def test_compiles_whole_and_once_for_all_batch_sizes():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    _, gate, _, params, _ = inputs(3, 2, 8, 12, 3, 4)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for G in (5, 6, 20):
        x, _, weights, _, pairs = inputs(G, 2, 8, 12, 3, 2 * G)
        for a, b in zip(compiled(x, gate, weights, params, pairs), run(x, gate, weights, params, pairs), strict=True):
            assert relative_error(a, b) < 1e-6
    assert counter.frame_count == 1


def test_errors_name_the_argument_and_its_value():
    x, gate, weights, (w1, b1, w2, b2), (groups, experts) = inputs(4, 5, 24, 40, 3, 6)
    with pytest.raises(ValueError, match=r"x has shape \(20, 24\); it must be \[G, Q, D\]"):
        post_route_logits(x.flatten(0, 1), gate, w1, b1, w2, b2)
    with pytest.raises(ValueError, match=r"gate has shape \(1, 23\); for hidden size 24"):
        post_route_logits(x, gate[:, 1:], w1, b1, w2, b2)
    hidden = post_route_logits(x, gate, w1, b1, w2, b2).hidden
    with pytest.raises(ValueError, match=r"w2 has shape \(3, 24, 39\); with 3 experts it must be \(3, 24, 40\)"):
        post_route_outputs(hidden, groups, experts, weights, w2[..., 1:], b2)
    with pytest.raises(ValueError, match=r"experts has shape \(5,\)"):
        post_route_outputs(hidden, groups, experts[1:], weights, w2, b2)
    with pytest.raises(ValueError, match=r"experts range from 0 to 3; they must be in \[0, 3\)"):
        post_route_outputs(hidden, groups, torch.where(experts == 2, 3, experts), weights, w2, b2)
