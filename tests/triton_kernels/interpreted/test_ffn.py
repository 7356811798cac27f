import pytest
import torch

from moe_zero.ops.gelu_ffn import gelu_ffn_dense_reference, gelu_ffn_reference
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


def check(x, ids, weights, params, *, tanh=False, saved=True, separate=False, config=SMALL, grad=None):
    """Result and every gradient against the fp64 reference."""
    x64, weights64, *params64 = double((x, weights, *params))
    approximate = "tanh" if tanh else "none"
    if ids is None:
        expected = gelu_ffn_dense_reference(x64, *params64, approximate=approximate)
    else:
        expected = gelu_ffn_reference(x64, ids, weights64, *params64, approximate=approximate)
    lists = [[] if p is None else list(p.unbind(0)) if separate else [p] for p in params]
    y, pre, order, offsets = ffn.gelu_ffn_forward(x, ids, weights, *lists, tanh, saved, config)
    assert y.shape == expected.shape and relative_error(y, expected) < TOLERANCE[x.dtype]
    assert pre.shape[0] == (expected.numel() // x.shape[1] if ids is None else ids.numel()) * saved
    grad = torch.randn(y.shape).to(y.dtype) if grad is None else grad
    K = 1 if ids is None else ids.shape[1]
    needs = [t is not None for t in (x, weights, *params)]
    state = (pre, order, offsets, ids is None, K, tanh, saved, needs)
    grads = ffn.gelu_ffn_backward(grad, x, weights, *lists, *state, config)
    leaves = (x64, weights64, *params64)
    compare(grads, [expected], leaves, [grad], TOLERANCE[x.dtype])
    return y, grads


def inputs(T, D, E, K, dtype):
    torch.manual_seed(T + E)
    return torch.randn(T, D).to(dtype), torch.rand(T, E).argsort(1)[:, :K], torch.rand(T, K)


@pytest.mark.parametrize("N", [0, 1, 31, 700])
@pytest.mark.parametrize("E", [1, 3, 64, 256])
def test_sort_by_expert_is_a_stable_sort(N, E):
    ids = torch.randint(0, E, (N,))
    order, offsets = ffn.sort_by_expert(ids, E)
    assert torch.equal(order.long(), ids.argsort(stable=True))
    assert torch.equal(offsets[1:].long(), torch.bincount(ids, minlength=E).cumsum(0)) and offsets[0] == 0


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("T", "D", "F", "E", "K"),
    [(1, 16, 16, 1, 1), (2, 7, 9, 2, 2), (20, 24, 40, 2, 2), (21, 33, 47, 7, 1), (5, 16, 24, 7, 7)],
)
def test_matches_reference(dtype, T, D, F, E, K):
    check(*inputs(T, D, E, K, dtype), parameters(E, D, F, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "E"), [(1, 1), (17, 3), (33, 2)])
def test_dense_matches_reference(dtype, T, E):
    x, *_ = inputs(T, 20, E, 1, dtype)
    check(x, None, None, parameters(E, 20, 36, dtype))


@pytest.mark.parametrize("config", [None, ProductConfig(32, 16, 32, 4, 1), ProductConfig(16, 32, 64, 4, 1)])
def test_other_tiles(config):
    check(*inputs(40, 48, 3, 2, torch.float32), parameters(3, 48, 80, torch.float32), config=config)


@pytest.mark.parametrize(("tanh", "saved"), [(False, True), (True, False)])
@pytest.mark.parametrize("biases", ["both", "first", "none"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_options(tanh, saved, biases, with_weights):
    x, ids, weights = inputs(9, 12, 3, 2, torch.float32)
    w1, b1, w2, b2 = parameters(3, 12, 20, torch.float32)
    b1, b2 = (b1, b2) if biases == "both" else (b1, None) if biases == "first" else (None, None)
    check(x, ids, weights if with_weights else None, (w1, b1, w2, b2), tanh=tanh, saved=saved)


def test_separate_experts_are_read_where_they_are():
    given = inputs(20, 12, 4, 2, torch.float32)
    params = parameters(4, 12, 20, torch.float32)
    grad = torch.randn(20, 12)
    stacked, separate = check(*given, params, grad=grad), check(*given, params, separate=True, grad=grad)
    assert torch.equal(stacked[0], separate[0])
    assert all(torch.equal(a, b) for a, b in zip(stacked[1], separate[1], strict=True))
    x, *_ = given
    assert torch.equal(check(x, None, None, params)[0], check(x, None, None, params, separate=True)[0])


def test_expert_without_tokens_gets_zero_gradient():
    x, ids, weights = inputs(20, 12, 4, 2, torch.float32)
    params = parameters(4, 12, 20, torch.float32)
    _, grads = check(x, torch.where(ids == 2, 3, ids), weights, params)
    assert all(torch.equal(g[2], torch.zeros_like(g[2])) for g in grads[2:])


def test_no_tokens():
    _, grads = check(*inputs(0, 12, 4, 2, torch.float32), parameters(4, 12, 20, torch.float32))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads[2:])
    check(torch.zeros(0, 12), None, None, parameters(2, 12, 20, torch.float32))


def test_both_places_of_a_token_on_the_same_expert():
    x, ids, weights = inputs(20, 12, 4, 2, torch.float32)
    ids[:10, 1] = ids[:10, 0]
    check(x, ids, weights, parameters(4, 12, 20, torch.float32))


def test_nan_row_spoils_no_other_row():
    x, ids, weights = inputs(40, 12, 3, 2, torch.float32)
    lists = [[p] for p in parameters(3, 12, 20, torch.float32)]
    clean, *_ = ffn.gelu_ffn_forward(x, ids, weights, *lists, False, False, SMALL)
    x[7] = float("nan")
    out, *_ = ffn.gelu_ffn_forward(x, ids, weights, *lists, False, False, SMALL)
    others = torch.arange(40) != 7
    assert torch.equal(out[others], clean[others]) and out[7].isnan().all()


def test_strided_inputs_weights_and_gradients_of_stride_zero():
    x, ids, weights = inputs(20, 12, 4, 2, torch.float32)
    params = [p.movedim(0, -1).contiguous().movedim(-1, 0) for p in parameters(4, 12, 20, torch.float32)]
    x, ids, weights = torch.stack([x] * 2, 2)[..., 1], ids.T.contiguous().T, weights.T.contiguous().T
    check(x, ids, weights, params, grad=torch.ones(()).expand(20, 12))
    check(x, None, None, params, grad=torch.ones(()).expand(4, 20, 12))


def test_weight_with_an_expert_stride_beyond_2_to_the_31_elements():
    x, ids, weights = inputs(5, 8, 2, 1, torch.float16)
    w1, b1, w2, b2 = parameters(2, 8, 16, torch.float16)
    storage = torch.empty(2**31 + 1024, dtype=torch.float16)
    far = storage.as_strided((2, 16, 8), (2**31 + 8, 8, 1))
    far.copy_(w1)
    check(x, ids, weights, (far, b1, w2, b2))
