"""The experts' operators with each instruction set that the processor has, and without the compiled extension."""

import subprocess
import sys

import pytest
import torch

from moe_zero.ops.beam_step import beam_step, beam_step_reference
from moe_zero.ops.combine import combine, combine_reference
from moe_zero.ops.gate import gate, gate_reference
from moe_zero.ops.gelu_ffn import gelu_ffn, gelu_ffn_reference
from moe_zero.ops.post_route import post_route_logits, post_route_reference


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same(run, reference, tensors, tolerance):
    """Result and gradients against the reference in fp64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, expected = run(*tensors), reference(*wide)
    grad = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, tensors, grad.to(out.dtype)), torch.autograd.grad(expected, wide, grad), strict=True
    )
    for actual, correct in pairs:
        assert (actual.double() - correct).norm() <= tolerance * correct.norm()


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gate(kernels, dtype):
    for T, Q, D, E in ((1, 1, 1, 2), (37, 1, 71, 11), (5, 3, 600, 70)):
        x, router = leaves((T, Q, D), (E, D), dtype=dtype)
        router = (router.detach() * D**-0.5).requires_grad_()
        assert_same(
            lambda x, r: gate(x, r, 2).probs, lambda x, r: gate_reference(x, r, 2).probs, (x, router), TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_combine(kernels, dtype):
    for T, K, D in ((1, 1, 5), (40, 3, 77)):
        tensors = leaves((T, K, D), (T, K), (T, D), (D,), (D,), dtype=dtype)
        assert_same(combine, combine_reference, tensors, TOLERANCE[dtype])
        assert_same(combine, combine_reference, tensors[:3], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_ffn(kernels, dtype, approximate):
    T, D, F, E = 150, 21, 45, 3  # experts with more and with fewer rows than our own products take
    ids = torch.tensor([[0, 1]] * 140 + [[2, 0]] * 10)
    x, *tensors = leaves((T, D), (T, 2), (E, F, D), (E, F), (E, D, F), (E, D), dtype=dtype)
    tensors = [(t.detach() * t.shape[-1] ** -0.5).requires_grad_() for t in tensors]
    assert_same(
        lambda x, *rest: gelu_ffn(x, ids, *rest, approximate=approximate),
        lambda x, *rest: gelu_ffn_reference(x, ids, *rest, approximate=approximate),
        [x, *tensors],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_every_magnitude(kernels, approximate):
    """Both tails, zeros, infinities and NaN, through an expert that is the identity."""
    values = torch.cat([torch.linspace(-14, 14, 1001), torch.tensor([0.0, -0.0, 1e-30, 1e20, -1e20, torch.inf])])
    values = torch.cat([values, torch.tensor([-torch.inf, torch.nan])]).unsqueeze(1).requires_grad_()
    one = torch.ones(1, 1, 1)
    ids = torch.zeros(len(values), 1, dtype=torch.int64)
    out = gelu_ffn(values, ids, None, one, None, one, None, approximate=approximate)
    expected = torch.nn.functional.gelu(values.double(), approximate=approximate)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=3e-7, equal_nan=True)
    (actual_grad,), (expected_grad,) = (torch.autograd.grad(y.sum(), values) for y in (out, expected))
    torch.testing.assert_close(actual_grad[:-7], expected_grad[:-7], rtol=1e-6, atol=1e-6)
    assert actual_grad[-1].isnan()


def test_softmax_of_infinite_logits(kernels):
    router = torch.tensor([[1.0], [2.0], [-1.0]])
    for value in (torch.inf, -torch.inf, torch.nan, 3e38):
        out, expected = (f(torch.tensor([[value]]), router, 1) for f in (gate, gate_reference))
        torch.testing.assert_close(out.probs, expected.probs, equal_nan=True)
        torch.testing.assert_close(out.logsumexp, expected.logsumexp, equal_nan=True)


def test_post_route(kernels):
    x, vector, *params = leaves((3, 4, 18), (18,), (2, 30, 18), (2, 30), (2, 18, 30), (2, 18))
    assert_same(
        lambda *t: post_route_logits(*t).logits, lambda *t: post_route_reference(*t)[0], (x, vector, *params), 1e-5
    )


def test_beam_step(kernels):
    scores, probs, routes = torch.rand(5, 3), torch.rand(15, 70), torch.randint(0, 70, (5, 3, 2))
    for k in (2, 30):
        out, expected = (f(scores, probs, k, routes) for f in (beam_step, beam_step_reference))
        assert torch.equal(out.parents, expected.parents) and torch.equal(out.routes, expected.routes)


WITHOUT_EXTENSION = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "moe_zero._ops_cpu" else find(name, *rest)
import pytest
from moe_zero import _extensions
importlib.util.find_spec = find
assert _extensions.ops_cpu is None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_without_the_compiled_extension():
    """The PyTorch implementations that stand in pass a part of the same tests."""
    files = ["test_gate.py", "test_combine.py", "test_beam_step.py", "test_gelu_ffn.py", "test_post_route.py"]
    choice = "(gradcheck or strided or ties or options or several_experts or spare or nan) and not cuda"
    folder = __file__.rsplit("test_instruction_sets", 1)[0]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION, *(folder + file for file in files), "-k", choice],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
