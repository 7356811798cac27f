import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from moe_zero.ops.gelu_ffn import gelu_ffn, gelu_ffn_dense, gelu_ffn_dense_reference, gelu_ffn_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative_error(out, reference):
    out, reference = out.double().cpu(), reference.double().cpu()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def parameters(E, D, F, dtype=torch.float32, device="cpu"):
    """w1, b1, w2, b2 at the scale of a trained layer, so that activations and gradients are of order one."""
    generator = torch.Generator().manual_seed(E + D + F)
    shapes = ((E, F, D), (E, F), (E, D, F), (E, D))
    values = [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    return [value.to(device, dtype).requires_grad_() for value in values]


def tokens(T, D, E, K, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(T + E)
    x = torch.randn(T, D, generator=generator).to(device, dtype).requires_grad_()
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K].to(device)
    weights = torch.rand(T, K, generator=generator).to(device).requires_grad_()
    return x, ids, weights


def double(tensor):
    return None if tensor is None else tensor.detach().cpu().double().requires_grad_()


def check(x, ids, weights, params, grad=None, **kwargs):
    """Output and every gradient against the fp64 reference on the same values."""
    x64, weights64, *params64 = map(double, (x, weights, *params))
    approximate = kwargs.get("approximate", "none")
    if ids is None:
        out = gelu_ffn_dense(x, *params, **kwargs)
        expected = gelu_ffn_dense_reference(x64, *params64, approximate=approximate)
    else:
        out = gelu_ffn(x, ids, weights, *params, **kwargs)
        expected = gelu_ffn_reference(x64, ids.cpu(), weights64, *params64, approximate=approximate)
    assert out.shape == expected.shape
    assert relative_error(out, expected) < TOLERANCE[out.dtype]
    pairs = zip((x, weights, *params), (x64, weights64, *params64), strict=True)
    leaves, leaves64 = zip(*((t, t64) for t, t64 in pairs if t is not None and t.requires_grad), strict=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) if grad is None else grad
    grads = torch.autograd.grad(out, leaves, grad.to(out))
    references = torch.autograd.grad(expected, leaves64, grad.double())
    for actual, reference, leaf in zip(grads, references, leaves, strict=True):
        assert actual.dtype == leaf.dtype and actual.shape == leaf.shape
        # Over a handful of numbers (the weights of a few tokens) rounding errors don't average out.
        tolerance = TOLERANCE[x.dtype] * (3 if actual.numel() < 64 else 1)
        assert relative_error(actual, reference) < tolerance, tuple(leaf.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize(("E", "K"), [(1, 1), (2, 1), (2, 2), (3, 2), (7, 1), (7, 7), (8, 2), (64, 2), (64, 64)])
def test_matches_reference(device, dtype, T, E, K):
    if T * K > 10000:
        T //= 8
    D, F = ((24, 40), (33, 47))[T % 2]
    check(*tokens(T, D, E, K, dtype, device), parameters(E, D, F, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "E"), [(0, 2), (1, 1), (17, 3), (130, 8)])
def test_dense_matches_reference(device, dtype, T, E):
    x, *_ = tokens(T, 33, E, 1, dtype, device)
    check(x, None, None, parameters(E, 33, 47, dtype, device))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("biases", ["both", "first", "none"])
def test_options(device, recompute, approximate, with_weights, biases):
    x, ids, weights = tokens(21, 20, 4, 2, device=device)
    w1, b1, w2, b2 = parameters(4, 20, 36, device=device)
    b1, b2 = (b1, b2) if biases == "both" else (b1, None) if biases == "first" else (None, None)
    options = {"recompute": recompute, "approximate": approximate}
    check(x, ids, weights if with_weights else None, (w1, b1, w2, b2), **options)
    check(x, None, None, (w1, b1, w2, b2), **options)


@pytest.mark.parametrize("E", [1, 3])
def test_parameters_of_separate_experts_need_no_stacking(device, E):
    x, ids, weights = tokens(30, 20, E, 1, device=device)
    stacked = parameters(E, 20, 36, device=device)
    separate = [[t.detach().clone().requires_grad_() for t in p] for p in stacked]
    out, expected = gelu_ffn(x, ids, weights, *separate), gelu_ffn(x, ids, weights, *stacked)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(expected.square().sum(), stacked)
    out.square().sum().backward()
    for tensors, grad in zip(separate, grads, strict=True):
        assert torch.equal(torch.stack([t.grad for t in tensors]), grad)


def test_frozen_parameters_get_no_gradient_and_cost_no_product(device):
    x, ids, weights = tokens(30, 20, 3, 2, device=device)
    w1, b1, w2, b2 = parameters(3, 20, 36, device=device)
    for frozen in ((w1, b1, w2, b2), (x, w1), (x, weights, b1, b2), (w2,)):
        leaves = [t.detach().requires_grad_(not any(t is f for f in frozen)) for t in (x, weights, w1, b1, w2, b2)]
        check(leaves[0], ids, leaves[1], leaves[2:])
    separate = [t.detach().clone().requires_grad_(i == 1) for i, t in enumerate(w1)]
    gelu_ffn(x.detach(), ids, None, separate, None, w2.detach(), None).sum().backward()
    assert separate[0].grad is None and separate[1].grad is not None


def test_expert_without_tokens_gets_zero_gradient(device):
    x, ids, weights = tokens(20, 24, 4, 2, device=device)
    params = parameters(4, 24, 40, device=device)
    ids = torch.where(ids == 2, 3, ids)
    gelu_ffn(x, ids, weights, *params).sum().backward()
    for p in params:
        assert torch.equal(p.grad[2], torch.zeros_like(p.grad[2])) and p.grad[3].abs().sum() > 0


def test_no_tokens_forward_and_backward(device):
    x, ids, weights = tokens(0, 24, 4, 2, device=device)
    params = parameters(4, 24, 40, device=device)
    gelu_ffn(x, ids, weights, *params).sum().backward()
    assert x.grad.shape == (0, 24) and weights.grad.shape == (0, 2)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params)


def test_both_places_of_a_token_on_the_same_expert(device):
    x, ids, weights = tokens(20, 24, 4, 2, device=device)
    ids[:10, 1] = ids[:10, 0]
    check(x, ids, weights, parameters(4, 24, 40, device=device))


def test_nan_row_spoils_no_other_row(device):
    x, ids, weights = tokens(40, 24, 4, 2, device=device)
    params = parameters(4, 24, 40, device=device)
    clean = gelu_ffn(x, ids, weights, *params)
    with torch.no_grad():
        x[7] = float("nan")
    out = gelu_ffn(x, ids, weights, *params)
    others = torch.arange(40) != 7
    assert torch.equal(out[others], clean[others]) and out[7].isnan().all()


def test_gradients_of_stride_zero(device):
    x, ids, weights = tokens(20, 24, 4, 2, device=device)
    params = parameters(4, 24, 40, device=device)
    check(x, ids, weights, params, grad=torch.ones(()).expand(20, 24))
    check(x, None, None, params, grad=torch.ones(()).expand(4, 20, 24))


def test_strided_and_permuted_inputs_and_weights(device):
    x, ids, weights = tokens(20, 24, 4, 2, device=device)
    params = [p.detach().movedim(0, -1).contiguous() for p in parameters(4, 24, 40, device=device)]
    params = [p.movedim(-1, 0).requires_grad_() for p in params]
    x = torch.stack([x.detach()] * 2, 2)[..., 1].requires_grad_()
    ids, weights = ids.T.contiguous().T, weights.detach().T.contiguous().T.requires_grad_()
    assert not any(t.is_contiguous() for t in (x, ids, weights, *params))
    check(x, ids, weights, params)


@pytest.mark.parametrize("pair", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_mixed_dtypes_promote(device, pair):
    x, ids, weights = tokens(20, 24, 4, 2, pair[0], device)
    params = parameters(4, 24, 40, pair[1], device)
    out = gelu_ffn(x, ids, weights, *params)
    assert out.dtype == torch.float32
    expected = gelu_ffn_reference(double(x), ids.cpu(), double(weights), *map(double, params))
    assert relative_error(out, expected) < 1e-5
    out.sum().backward()
    assert x.grad.dtype == pair[0] and weights.grad.dtype == torch.float32
    assert all(p.grad.dtype == pair[1] for p in params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(device, dtype, input_dtype):
    x, ids, weights = tokens(20, 24, 4, 2, input_dtype, device)
    params = parameters(4, 24, 40, device=device)
    with torch.autocast(device, dtype):
        out = gelu_ffn(x, ids, weights, *params)
    assert out.dtype == dtype
    assert relative_error(out, gelu_ffn_reference(double(x), ids.cpu(), double(weights), *map(double, params))) < 1e-2
    with torch.autocast(device, dtype):
        out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in params) and x.grad.dtype == input_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_from_run_to_run(device, dtype):
    x, ids, weights = tokens(300, 24, 4, 2, dtype, device)
    params = parameters(4, 24, 40, dtype, device)

    def run():
        out = gelu_ffn(x, ids, weights, *params)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, weights, *params])

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_weight_with_an_expert_stride_beyond_2_to_the_31_elements():
    # Two experts 2^31 elements apart in an allocation whose untouched pages cost nothing.
    x, ids, weights = tokens(5, 8, 2, 1, torch.float16)
    w1, b1, w2, b2 = parameters(2, 8, 16, torch.float16)
    storage = torch.empty(2**31 + 1024, dtype=torch.float16)
    far = storage.as_strided((2, 16, 8), (2**31 + 8, 8, 1))
    far.copy_(w1.detach())
    assert torch.equal(gelu_ffn(x, ids, weights, far, b1, w2, b2), gelu_ffn(x, ids, weights, w1, b1, w2, b2))


def gradient_inputs():
    x, ids, weights = tokens(5, 4, 3, 2)
    return [t.detach().double().requires_grad_() for t in (x, weights, *parameters(3, 4, 6))], ids


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck(approximate, recompute):
    (x, weights, *params), ids = gradient_inputs()
    options = {"approximate": approximate, "recompute": recompute}
    assert torch.autograd.gradcheck(lambda x, w, *p: gelu_ffn(x, ids, w, *p, **options), (x, weights, *params))
    assert torch.autograd.gradcheck(lambda x, *p: gelu_ffn_dense(x, *p, **options), (x, *params))


@pytest.mark.parametrize("T", [0, 1, 7])
@pytest.mark.parametrize("form", ["stacked", "separate", "dense"])
@pytest.mark.parametrize("save", [False, True])
def test_opcheck(device, T, form, save):
    x, ids, weights = tokens(T, 8, 3, 2, device=device)
    w1, b1, w2, b2 = ([p] for p in parameters(3, 8, 12, device=device))
    if form == "separate":
        w1, b1, w2, b2 = ([t.detach().requires_grad_() for t in p[0]] for p in (w1, b1, w2, b2))
    if form == "dense":
        ids = weights = None
    opcheck(torch.ops.moe_zero.gelu_ffn.default, (x, ids, weights, w1, b1, w2, b2, False, save))


def test_compiles_whole_and_once_for_all_token_counts():
    torch._dynamo.reset()
    params = parameters(3, 8, 12)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, ids, weights):
        return gelu_ffn(x, ids, weights, *params) + gelu_ffn_dense(x, *params).sum(0)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for T in (5, 6, 40, 1000):
        inputs = tokens(T, 8, 3, 2)
        out, expected = compiled(*inputs), layer(*inputs)
        assert relative_error(out, expected) < 1e-6
        grads = torch.autograd.grad(out.square().sum(), [inputs[0], *params])
        for a, b in zip(grads, torch.autograd.grad(expected.square().sum(), [inputs[0], *params]), strict=True):
            assert relative_error(a, b) < 1e-5
    assert counter.frame_count == 1


def test_exports():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.params = torch.nn.ParameterList([p.detach() for p in parameters(3, 8, 12)])

        def forward(self, x, ids, weights):
            return gelu_ffn(x, ids, weights, *self.params)

    module, T = Layer(), torch.export.Dim("T")
    program = torch.export.export(module, tokens(7, 8, 3, 2), dynamic_shapes=({0: T}, {0: T}, {0: T}))
    more = tokens(30, 8, 3, 2)
    assert torch.equal(program.module()(*more), module(*more))


def test_activation_checkpointing():
    x, ids, weights = tokens(20, 8, 3, 2)
    params = parameters(3, 8, 12)
    out = torch.utils.checkpoint.checkpoint(gelu_ffn, x, ids, weights, *params, use_reentrant=False)
    grads = torch.autograd.grad(out.sum(), [x, *params])
    expected = torch.autograd.grad(gelu_ffn(x, ids, weights, *params).sum(), [x, *params])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_recompute_keeps_no_pre_activations():
    T, D, F = 500, 8, 64
    x, ids, weights = tokens(T, D, 2, 1)
    params = parameters(2, D, F)

    def saved_numel(recompute):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            gelu_ffn(x, ids, weights, *params, recompute=recompute)
        return sum(sizes)

    assert saved_numel(False) - saved_numel(True) == T * F


@pytest.mark.parametrize("bad", [-1, 3])
def test_expert_index_out_of_range_is_an_error_before_any_product(bad):
    x, ids, weights = tokens(5, 8, 3, 2)
    ids[3, 1] = bad
    with pytest.raises(ValueError, match=r"for 3 experts they must be in \[0, 3\)"):
        gelu_ffn(x, ids, weights, *parameters(3, 8, 12))


def test_errors_name_the_argument_and_its_value():
    x, ids, weights = tokens(5, 8, 3, 2)
    w1, b1, w2, b2 = parameters(3, 8, 12)
    with pytest.raises(ValueError, match=r"x has shape \(1, 5, 8\); it must be \[T, D\]"):
        gelu_ffn(x[None], ids, weights, w1, b1, w2, b2)
    with pytest.raises(ValueError, match=r"ids have shape \(4, 2\); for 5 tokens"):
        gelu_ffn(x, ids[:4], weights, w1, b1, w2, b2)
    with pytest.raises(ValueError, match=r"weights have shape \(5, 1\), but ids have \(5, 2\)"):
        gelu_ffn(x, ids, weights[:, :1], w1, b1, w2, b2)
    with pytest.raises(ValueError, match=r"w2 has shape \(3, 12, 8\).*it must be \(3, 8, 12\)"):
        gelu_ffn(x, ids, weights, w1, b1, w2.transpose(1, 2), b2)
    with pytest.raises(ValueError, match=r"b1\[1\] has shape \(11,\).*it must be \(12,\)"):
        gelu_ffn(x, ids, weights, w1, [b1[0], b1[1][1:], b1[2]], w2, b2)
    with pytest.raises(ValueError, match="b2 is of 2 experts; there are 3"):
        gelu_ffn(x, ids, weights, w1, b1, w2, b2[:2])
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        gelu_ffn(x, ids, weights, w1, b1, w2, b2, approximate="erf")
    with pytest.raises(TypeError, match=r"ids have dtype torch.float32"):
        gelu_ffn(x, ids.float(), weights, w1, b1, w2, b2)
    with pytest.raises(TypeError, match=r"w1 has dtype torch.int64"):
        gelu_ffn(x, ids, weights, w1.long(), b1, w2, b2)
