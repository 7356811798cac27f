import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from moe_zero.ops.gate import gate, gate_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FLOAT_FIELDS = ("weights", "probs", "importance", "logsumexp")


def relative_error(out, reference):
    out, reference = out.double().cpu(), reference.double().cpu()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def inputs(*shape, E, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(sum(shape) + E)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    router = torch.randn(E, shape[-1], generator=generator).to(device, dtype)
    return x.requires_grad_(), router.requires_grad_()


def check(x, router, k, renormalize):
    """Forward and gradients of every float result against the fp64 reference on the same values."""
    x64, router64 = (t.detach().cpu().double().requires_grad_() for t in (x, router))
    expected = gate_reference(x64, router64, k, renormalize=renormalize)
    out = gate(x, router, k, renormalize=renormalize)
    assert torch.equal(out.ids.cpu(), expected.ids)
    assert torch.equal(out.counts.cpu(), expected.counts)
    for name in FLOAT_FIELDS:
        assert relative_error(getattr(out, name), getattr(expected, name)) < 1e-5, name
    torch.manual_seed(0)
    grads = [torch.randn_like(getattr(expected, name)) for name in FLOAT_FIELDS]
    results = [getattr(out, name) for name in FLOAT_FIELDS]
    actual = torch.autograd.grad(results, (x, router), [g.to(r) for g, r in zip(grads, results, strict=True)])
    reference = torch.autograd.grad([getattr(expected, name) for name in FLOAT_FIELDS], (x64, router64), grads)
    assert relative_error(actual[0], reference[0]) < TOLERANCE[x.dtype]
    assert relative_error(actual[1], reference[1]) < TOLERANCE[router.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize(("E", "k"), [(1, 1), (2, 1), (3, 2), (7, 7), (8, 2), (64, 2), (256, 8)])
def test_matches_reference(device, dtype, T, E, k):
    check(*inputs(T, 33 if T % 2 else 48, E=E, dtype=dtype, device=device), k, renormalize=T % 3 == 0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("B", "Q", "D"), [(1, 1, 8), (3, 5, 33), (4, 32, 768), (0, 4, 8)])
def test_mean_over_the_rows_of_a_sequence(device, B, Q, D, renormalize):
    check(*inputs(B, Q, D, E=5, device=device), 2, renormalize)


def test_wide_rows(device):
    x, router = (t.detach() for t in inputs(3, 8192, E=8, device=device))
    router /= 90  # logits of order one: fp32 holds those of order 90 to no better than 1e-5
    check(x.requires_grad_(), router.requires_grad_(), 2, True)


def test_router_in_fp32_with_tokens_in_bf16(device):
    x, router = inputs(20, 40, E=4, device=device)
    check(x.detach().bfloat16().requires_grad_(), router, 2, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_round_the_logits(device, dtype):
    x, router = inputs(20, 40, E=4, device=device)
    with torch.autocast(device, dtype):
        out = gate(x, router, 2)
    assert out.probs.dtype == torch.float32
    assert relative_error(out.probs, gate_reference(x, router, 2).probs) < 1e-5


def test_strided_tokens_and_router(device):
    x, router = inputs(6, 20, E=4, device=device)
    x = x.detach().T.contiguous().T.requires_grad_()
    router = torch.stack([router.detach()] * 2, 2)[..., 1].requires_grad_()
    check(x, router, 2, True)


def test_gradients_of_stride_zero(device):
    x, router = inputs(6, 20, E=4, device=device)
    gate(x, router, 2).weights.sum().backward()
    x2, router2 = (t.detach().clone().requires_grad_() for t in (x, router))
    gate_reference(x2, router2, 2).weights.sum().backward()
    assert relative_error(x.grad, x2.grad) < 1e-5 and relative_error(router.grad, router2.grad) < 1e-5


def test_nan_row_spoils_no_other_row_and_takes_distinct_experts(device):
    x, router = (t.detach() for t in inputs(6, 20, E=5, device=device))
    clean = gate(x, router, 3)
    x[2, 4] = float("nan")
    for k in (1, 2, 3):
        out = gate(x, router, k)
        others = [0, 1, 3, 4, 5]
        assert torch.equal(out.ids[others], clean.ids[others, :k])
        assert torch.equal(out.weights[others], clean.weights[others, :k])
        assert len(set(out.ids[2].tolist())) == k and out.ids.min() >= 0 and out.ids.max() < 5


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_ties_resolve_as_a_stable_sort(device, k):
    x, router = (t.detach() for t in inputs(50, 8, E=2, device=device))
    router = router[[0, 1, 0, 1, 0]]
    expected = (x @ router.T).sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(gate(x, router, k).ids, expected)


def test_logits_of_minus_infinity_do_not_repeat_an_expert(device):
    x = torch.full((3, 2), -float("inf"), device=device)
    router = torch.tensor([[0.5, 0.5], [1.0, 1.0], [2.0, 2.0]], device=device)
    for k in (2, 3):
        assert all(len(set(row)) == k for row in gate(x, router, k).ids.tolist())


def test_no_gradient_flows_through_counts_and_ids(device):
    out = gate(*inputs(6, 20, E=4, device=device), 2)
    assert not out.ids.requires_grad and not out.counts.requires_grad
    assert out.ids.dtype == out.counts.dtype == torch.int64


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradcheck(renormalize):
    x, router = inputs(5, 6, E=4)
    x, router = (t.detach().double().requires_grad_() for t in (x, router))
    fn = lambda x, router: [getattr(gate(x, router, 2, renormalize=renormalize), f) for f in FLOAT_FIELDS]  # noqa: E731
    assert torch.autograd.gradcheck(fn, (x, router))
    assert torch.autograd.gradcheck(fn, (x.detach().unflatten(0, (1, 5)).requires_grad_(), router))


@pytest.mark.parametrize("shape", [(7, 1, 20), (3, 4, 20), (0, 1, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(device, shape, dtype):
    x, router = inputs(*shape, E=4, dtype=dtype, device=device)
    opcheck(torch.ops.moe_zero.gate.default, (x, router, 2, True))


def test_compiles_whole_and_once_for_all_token_counts():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gate, fullgraph=True, dynamic=True, backend=counter)
    for T in (5, 6, 40, 1000):
        x, router = inputs(T, 20, E=4)
        out, expected = compiled(x, router, 2), gate(x, router, 2)
        assert torch.equal(out.ids, expected.ids)
        out.weights.square().sum().backward()
    assert counter.frame_count == 1


def test_exports():
    class Router(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x):
            return tuple(gate(x, self.weight, 2))

    x, router = (t.detach() for t in inputs(7, 20, E=4))
    module = Router(router)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("T")}})
    more = torch.cat([x, x])
    for out, expected in zip(program.module()(more), module(more), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("x", "router", "k", "message"),
    [
        (torch.zeros(4), torch.zeros(2, 4), 1, r"x has shape \(4,\)"),
        (torch.zeros(3, 4), torch.zeros(2, 5), 1, r"router has shape \(2, 5\); for x of hidden size 4"),
        (torch.zeros(3, 4), torch.zeros(2, 4), 3, "k is 3; it must be between 1 and the number of experts, 2"),
        (torch.zeros(3, 0, 4), torch.zeros(2, 4), 1, "at least one row"),
        (torch.zeros(3, 4), torch.zeros(2, 4, device="meta"), 1, "router is on meta, but x is on cpu"),
    ],
)
def test_errors_name_the_argument_and_its_value(x, router, k, message):
    with pytest.raises(ValueError, match=message):
        gate(x, router, k)
    with pytest.raises(TypeError, match=r"x has dtype torch.int64"):
        gate(x.long(), router, k)
