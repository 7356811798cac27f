"""torch.func over the operators: grad, vjp, jacrev, functional_call and vmap in any composition."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vjp, vmap

from moe_zero.layers import TokenMoE
from moe_zero.ops.beam_step import beam_step
from moe_zero.ops.combine import combine
from moe_zero.ops.gate import gate
from moe_zero.ops.gelu_ffn import gelu_ffn, gelu_ffn_dense
from moe_zero.ops.post_route import post_route_logits, post_route_outputs

B, T, D, F, E, K = 3, 5, 6, 7, 4, 2
IDS = torch.arange(B * T * K).view(B, T, K) * 7 % 11 % E


def double(*shape):
    return torch.randn(shape, dtype=torch.double)


def parameters(*lead):
    return [double(*lead, *shape) for shape in ((E, F, D), (E, F), (E, D, F), (E, D))]


def from_lists(x, ids, weights, *params):
    return gelu_ffn(x, ids, weights, *(list(p.unbind(0)) for p in params))


def post_route(x, gate_D, *params):
    """Logits of every expert, and outputs of three pairs of a group and an expert."""
    logits, hidden = post_route_logits(x, gate_D, *params)
    groups, experts = torch.tensor([[0, 1, 1], [3, 0, 2]])
    return logits, post_route_outputs(hidden, groups, experts, None, *params[2:])


CASES = {
    "gate": (lambda x, router: gate(x, router, K, renormalize=True), lambda *b: (double(*b, T, D), double(E, D))),
    "gate over rows": (lambda x, router: gate(x, router, K), lambda *b: (double(*b, T, 3, D), double(E, D))),
    "gelu_ffn": (gelu_ffn, lambda *b: (double(*b, T, D), IDS if b else IDS[0], double(*b, T, K), *parameters())),
    "gelu_ffn, separate experts": (
        from_lists,
        lambda *b: (double(*b, T, D), IDS if b else IDS[0], double(*b, T, K), *parameters()),
    ),
    "gelu_ffn, dense": (gelu_ffn_dense, lambda *b: (double(*b, T, D), *parameters())),
    "post_route": (post_route, lambda *b: (double(*b, 2, 3, D), double(D), *parameters())),
    "combine": (combine, lambda *b: (double(*b, T, K, D), double(*b, T, K))),
    "combine with norm": (
        lambda *args: combine(*args, eps=1e-5),
        lambda *b: (double(*b, T, K, D), double(*b, T, K), double(*b, T, D), double(D), double(D)),
    ),
    "beam_step": (
        lambda scores, probs, routes: beam_step(scores, probs, K, routes),
        lambda *b: (torch.rand(*b, T, 2), torch.rand(*b, 2 * T, E), torch.randint(0, E, (*b, T, 2, 3))),
    ),
}
DIFFERENTIABLE = [name for name in CASES if name != "beam_step"]


def tensors(out):
    return out if isinstance(out, tuple) else (out,)


def one_by_one(function, in_dims, args):
    """What vmap means."""
    picked = ([a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)] for i in range(B))
    return [torch.stack(outs) for outs in zip(*(tensors(function(*p)) for p in picked), strict=True)]


def assert_vmaps(function, in_dims, args):
    actual, expected = tensors(vmap(function, in_dims)(*args)), one_by_one(function, in_dims, args)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def loss(function):
    """One number of all results that are floats."""

    def run(*args):
        return sum(out.square().sum() for out in tensors(function(*args)) if out.is_floating_point())

    return run


def dims_of_rows(make):
    return tuple(0 if batched.shape != single.shape else None for batched, single in zip(make(B), make(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_rows(name):
    function, make = CASES[name]
    assert_vmaps(function, dims_of_rows(make), make(B))


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_another_dimension_of_the_first_argument_alone(name):
    function, make = CASES[name]
    first, *rest = make()
    first = torch.stack([first, first + 1, first * 2], -1)
    assert_vmaps(function, (first.dim() - 1, *[None] * len(rest)), (first, *rest))


@pytest.mark.parametrize("name", ["gate", "gelu_ffn", "gelu_ffn, separate experts", "gelu_ffn, dense", "post_route"])
def test_vmap_over_parameters(name):
    function, make = CASES[name]
    *rest, last = make()
    assert_vmaps(function, (*[None] * len(rest), 1), (*rest, torch.stack([last, last + 1, last * 2], 1)))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_grad_and_vjp_equal_autograd(name):
    function, make = CASES[name]
    args = make()
    floats = tuple(i for i, a in enumerate(args) if a.is_floating_point())
    leaves = [a.clone().requires_grad_() if i in floats else a for i, a in enumerate(args)]
    expected = torch.autograd.grad(loss(function)(*leaves), [leaves[i] for i in floats])
    by_grad = grad(loss(function), floats)(*args)

    def of_floats(*given):
        given = iter(given)
        return loss(function)(*(next(given) if i in floats else a for i, a in enumerate(args)))

    by_vjp = vjp(of_floats, *(args[i] for i in floats))[1](torch.ones((), dtype=torch.double))
    for reference, *found in zip(expected, by_grad, by_vjp, strict=True):
        for gradient in found:
            torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_each_sample(name):
    """vmap(grad), of the parameters too, which are shared; and grad(vmap)."""
    function, make = CASES[name]
    args, in_dims = make(B), dims_of_rows(make)
    floats = tuple(i for i, a in enumerate(args) if a.is_floating_point())
    assert_vmaps(grad(loss(function), floats), in_dims, args)
    whole = grad(lambda *a: vmap(loss(function), in_dims)(*a).sum(), floats)(*args)
    for i, total, each in zip(floats, whole, vmap(grad(loss(function), floats), in_dims)(*args), strict=True):
        torch.testing.assert_close(total, each if in_dims[i] == 0 else each.sum(0))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_jacrev(name):
    function, make = CASES[name]
    first, *rest = make()
    run = lambda x: tensors(function(x, *rest))[0]  # noqa: E731
    expected = torch.autograd.functional.jacobian(run, first)
    torch.testing.assert_close(jacrev(run)(first), expected)


def test_gradients_of_each_sample_of_a_layer():
    layer = TokenMoE(D, F, num_experts=E, top_k=K).double()
    params = {name: p.detach() for name, p in layer.named_parameters()}
    x = double(B, T, D)

    def run(params, x):
        return functional_call(layer, params, (x,)).square().sum()

    each = vmap(grad(run), (None, 0))(params, x)
    for i in range(B):
        expected = torch.autograd.grad(layer(x[i]).square().sum(), list(layer.parameters()))
        for gradient, reference in zip(each.values(), expected, strict=True):
            torch.testing.assert_close(gradient[i], reference)


def test_vmap_in_a_compiled_function():
    function, make = CASES["combine"]
    compiled = torch.compile(vmap(function), backend="aot_eager", fullgraph=True)
    y, weights = make(B)
    torch.testing.assert_close(compiled(y, weights), vmap(function)(y, weights))


@pytest.mark.parametrize("name", ["gate", "gelu_ffn", "gelu_ffn, separate experts", "combine with norm"])
def test_autocast_does_what_it_does_without_transforms(name):
    function, make = CASES[name]
    args = [a.float() if a.is_floating_point() else a for a in make()]
    with torch.autocast("cpu"):
        leaf = args[0].clone().requires_grad_()
        expected = torch.autograd.grad(loss(function)(leaf, *args[1:]), leaf)[0]
        assert torch.equal(grad(loss(function))(*args), expected)
        stacked = vmap(grad(loss(function)), (0, *[None] * (len(args) - 1)))(torch.stack([args[0]] * 2), *args[1:])
        assert torch.equal(stacked[1], expected)


def test_gradients_of_gradients_are_refused():
    function, make = CASES["combine"]
    y, weights = make()
    with pytest.raises(RuntimeError, match="gradients of gradients are not available"):
        grad(lambda y: grad(loss(function))(y, weights).sum())(y)


def test_an_empty_mapped_dimension_is_refused():
    function, make = CASES["combine"]
    y, weights = make(B)
    with pytest.raises(ValueError, match="dimension of size 0"):
        vmap(function)(y[:0], weights[:0])
