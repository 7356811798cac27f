import pytest
import torch

from moe_zero.ops.post_route import post_route_reference
from moe_zero.triton_kernels import ffn
from moe_zero.triton_kernels.tuning import ProductConfig

# The interpreter truncates when it stores bf16, which doubles the rounding error that a GPU makes.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SMALL = ProductConfig(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)


def relative_error(out, reference):
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def parameters(E, D, F, dtype):
    shapes = ((E, F, D), (E, F), (E, D, F), (E, D))
    return [(torch.randn(shape) * shape[-1] ** -0.5).to(dtype) for shape in shapes]


def double(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def compare(actual, outputs, leaves, grads, tolerance):
    present = [t for t in leaves if t is not None]
    wanted = iter(
        torch.autograd.grad(outputs, present, [g.double() for g in grads], materialize_grads=True, allow_unused=True)
    )
    for out, leaf in zip(actual, leaves, strict=True):
        if leaf is None:
            assert out.numel() == 0
        else:
            assert relative_error(out, next(wanted)) < tolerance * (3 if out.numel() < 64 else 1), tuple(leaf.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", ["logits", "outputs", "both"])
@pytest.mark.parametrize(("G", "Q", "E", "separate"), [(3, 5, 2, False), (4, 3, 4, True), (1, 20, 1, False)])
def test_matches_reference(dtype, use, G, Q, E, separate):
    torch.manual_seed(0)
    D, F, S = 12, 20, min(5, G * E)
    x, gate = torch.randn(G, Q, D).to(dtype), torch.randn(D)
    params = parameters(E, D, F, dtype)
    pairs = torch.randperm(G * E)[:S]
    groups, experts, weights = pairs // E, pairs % E, torch.rand(S)
    folded = torch.einsum("edf,d->ef", params[2].float(), gate)
    w1, b1, w2, b2 = (list(p.unbind(0)) if separate and E > 1 else [p] for p in params)

    logits, pre = ffn.post_route_up(x.flatten(0, 1), Q, w1, b1, folded, False, SMALL)
    pre_EGQF = pre.view(E, G, Q, F)
    out = ffn.post_route_down(pre_EGQF, groups, experts, weights, w2, b2, False, SMALL)
    x64, gate64, weights64, *params64 = double((x, gate, weights, *params))
    expected_logits, y_EGQD = post_route_reference(x64, gate64, *params64[:3], None)
    expected = (y_EGQD + params64[3][:, None, None])[experts, groups] * weights64[:, None, None]
    assert relative_error(logits, expected_logits) < TOLERANCE[dtype]
    assert relative_error(out, expected) < TOLERANCE[dtype]

    grad_logits, grad_out = torch.randn(G, E), torch.randn(S, Q, D).to(dtype)
    needs = [True] * 4
    grad_pre = grad_weights = grad_b2 = None
    grad_w2 = torch.zeros(E, D, F)
    if use != "logits":
        grads = ffn.post_route_down_backward(grad_out, pre_EGQF, groups, experts, weights, w2, b2, False, needs, SMALL)
        grad_pre, grad_weights, grad_w2, grad_b2 = grads
        grad_pre = grad_pre.view(E, G * Q, F)
    used_logits = grad_logits if use != "outputs" else None
    up = ffn.post_route_up_backward(used_logits, grad_pre, x.flatten(0, 1), Q, w1, folded, pre, False, needs, SMALL)
    grad_x, grad_w1, grad_b1, grad_folded = up
    grad_gate = torch.einsum("edf,ef->d", params[2].float(), grad_folded)
    grad_w2 = grad_w2.float() + torch.einsum("d,ef->edf", gate, grad_folded)

    outputs = [o for o, name in ((expected_logits, "logits"), (expected, "outputs")) if use in (name, "both")]
    grads = [g for g, name in ((grad_logits, "logits"), (grad_out, "outputs")) if use in (name, "both")]
    actual = [grad_x.view(x.shape), grad_gate, grad_w1, grad_b1, grad_w2]
    leaves = [x64, gate64, *params64[:3]]
    if use == "outputs":
        actual, leaves = [*actual, grad_weights, grad_b2], [*leaves, weights64, params64[3]]
    compare(actual, outputs, leaves, grads, TOLERANCE[dtype])
