import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from moe_zero.ops.combine import combine, combine_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [
    ("weights", "residual", "norm_weight", "norm_bias"),
    ("weights", "residual", "norm_weight"),
    ("weights", "residual"),
    ("weights",),
    ("residual", "norm_weight", "norm_bias"),
    (),
]


def relative_error(out, reference):
    out, reference = out.double().cpu(), reference.double().cpu()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def inputs(T, K, D, dtype=torch.float32, device="cpu", form=FORMS[0]):
    generator = torch.Generator().manual_seed(T + K + D)
    shapes = {"y": (T, K, D), "weights": (T, K), "residual": (T, D), "norm_weight": (D,), "norm_bias": (D,)}
    dtypes = {"y": dtype, "residual": dtype}
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator).to(device, dtypes.get(name, torch.float32))
        tensors[name] = value.requires_grad_() if name == "y" or name in form else None
    return list(tensors.values())


def check(tensors, grad=None, eps=1e-12):
    doubles = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    out, expected = combine(*tensors, eps=eps), combine_reference(*doubles, eps=eps)
    tolerance = TOLERANCE[tensors[0].dtype]
    assert relative_error(out, expected) < tolerance
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) if grad is None else grad
    leaves = [t for t in tensors if t is not None]
    grads = torch.autograd.grad(out, leaves, grad.to(out))
    expected_grads = torch.autograd.grad(expected, [d for d in doubles if d is not None], grad.to(out).cpu().double())
    for actual, reference, leaf in zip(grads, expected_grads, leaves, strict=True):
        assert actual.dtype == leaf.dtype and actual.shape == leaf.shape
        assert relative_error(actual, reference) < tolerance, tuple(leaf.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize(("K", "D"), [(1, 33), (2, 48), (7, 20)])
def test_matches_reference(device, dtype, T, K, D):
    check(inputs(T, K, D, dtype, device))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form) or "sum")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forms(device, dtype, form):
    check(inputs(40, 3, 24, dtype, device, form), eps=1e-5)


def test_wide_rows(device):
    check(inputs(3, 2, 8192, device=device))


def test_strided_inputs(device):
    tensors = [t.detach() for t in inputs(20, 2, 24, device=device)]
    tensors = [t.movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_() for t in tensors]
    check(tensors)


def test_gradients_of_stride_zero(device):
    check(inputs(20, 2, 24, device=device, form=FORMS[2]), grad=torch.ones(()).expand(20, 24))


def test_mixed_dtypes_promote_and_norm_in_fp32(device):
    y, weights, residual, norm_weight, norm_bias = inputs(20, 2, 24, torch.bfloat16, device)
    residual = residual.detach().float().requires_grad_()
    out = combine(y, weights, residual, norm_weight, norm_bias)
    assert out.dtype == torch.float32
    expected = combine_reference(*(t.double() for t in (y, weights, residual, norm_weight, norm_bias)))
    assert relative_error(out, expected) < 1e-5
    with torch.autocast(device, torch.float16):
        assert torch.equal(combine(y, weights, residual, norm_weight, norm_bias), out)


def test_nan_row_spoils_no_other_row(device):
    tensors = [t.detach() for t in inputs(20, 2, 24, device=device)]
    clean = combine(*tensors)
    tensors[0][3, 1, 5] = float("nan")
    out, others = combine(*tensors), torch.arange(20) != 3
    assert torch.equal(out[others], clean[others]) and out[3].isnan().all()


def test_only_asked_gradients_are_computed(device):
    for wanted in range(5):
        tensors = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs(9, 2, 24, device=device))]
        everything = inputs(9, 2, 24, device=device)
        (grad,) = torch.autograd.grad(combine(*tensors).square().sum(), [tensors[wanted]])
        expected = torch.autograd.grad(combine(*everything).square().sum(), everything)[wanted]
        assert torch.equal(grad, expected)


def test_same_bits_from_run_to_run(device):
    tensors = inputs(1000, 2, 24, device=device)
    grads = [torch.autograd.grad(combine(*tensors).square().sum(), tensors) for _ in range(3)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form) or "sum")
def test_gradcheck(form):
    tensors = [None if t is None else t.detach().double().requires_grad_() for t in inputs(4, 2, 6, form=form)]
    present = [t for t in tensors if t is not None]

    def run(*given):
        given = iter(given)
        return combine(*(None if t is None else next(given) for t in tensors))

    assert torch.autograd.gradcheck(run, present)


@pytest.mark.parametrize("T", [0, 7])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form) or "sum")
def test_opcheck(device, T, form):
    opcheck(torch.ops.moe_zero.combine.default, (*inputs(T, 2, 8, device=device, form=form), 1e-5))


def test_compiles_whole_and_once_for_all_token_counts():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(combine, fullgraph=True, dynamic=True, backend=counter), []
    for T in (5, 6, 300):
        tensors = inputs(T, 2, 8)
        out = compiled(*tensors)
        assert relative_error(out, combine(*tensors)) < 1e-6
        out.sum().backward()
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_exports():
    class Combine(torch.nn.Module):
        def forward(self, y, weights, residual, norm_weight, norm_bias):
            return combine(y, weights, residual, norm_weight, norm_bias)

    T = torch.export.Dim("T")
    tensors = [t.detach() for t in inputs(7, 2, 8)]
    program = torch.export.export(Combine(), tuple(tensors), dynamic_shapes=({0: T}, {0: T}, {0: T}, None, None))
    more = [t.detach() for t in inputs(30, 2, 8)]
    assert torch.equal(program.module()(*more), combine(*more))


def test_errors_name_the_argument_and_its_value():
    y, weights, residual, norm_weight, norm_bias = inputs(5, 2, 8)
    with pytest.raises(ValueError, match=r"y has shape \(5, 16\); it must be \[T, K, D\]"):
        combine(y.flatten(1), weights)
    with pytest.raises(ValueError, match=r"weights has shape \(5, 1\).*it must be \(5, 2\)"):
        combine(y, weights[:, :1])
    with pytest.raises(ValueError, match=r"residual has shape \(4, 8\).*it must be \(5, 8\)"):
        combine(y, weights, residual[:4])
    with pytest.raises(ValueError, match="norm_bias is given without norm_weight"):
        combine(y, weights, residual, None, norm_bias)
    with pytest.raises(TypeError, match=r"norm_weight has dtype torch.int64"):
        combine(y, weights, residual, norm_weight.long())
