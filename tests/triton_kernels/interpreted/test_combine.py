import pytest
import torch

from moe_zero.ops.combine import combine_reference
from moe_zero.triton_kernels import combine
from moe_zero.triton_kernels.combine import combine_backward, combine_forward

# The interpreter truncates when it stores bf16, which doubles the rounding error that a GPU makes.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FORMS = ["wrgb", "wrg", "wr", "w", "rgb", ""]  # weights, residual, norm gain, norm bias


def relative_error(out, reference):
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def inputs(T, K, D, dtype, form):
    torch.manual_seed(T + K)
    shapes = {"y": (T, K, D), "w": (T, K), "r": (T, D), "g": (D,), "b": (D,)}
    dtypes = {"y": dtype, "r": dtype}
    return [
        torch.randn(shape).to(dtypes.get(name, torch.float32)) if name in "y" + form else None
        for name, shape in shapes.items()
    ]


def check(tensors, grad=None, eps=1e-5):
    y, weights, residual, gain, _ = tensors
    doubles = [None if t is None else t.double().requires_grad_() for t in tensors]
    expected = combine_reference(*doubles, eps=eps)
    out, mean, rstd = combine_forward(*tensors, eps, y.dtype)
    tolerance = TOLERANCE[y.dtype]
    assert out.dtype == y.dtype and relative_error(out, expected) < tolerance
    grad = torch.randn(out.shape).to(out.dtype) if grad is None else grad
    grads = [y.new_empty(0) if t is None else torch.full(t.shape, float("nan"), dtype=t.dtype) for t in tensors]
    combine_backward(grad, y, weights, residual, gain, mean, rstd, tuple(grads))
    present = [i for i, t in enumerate(tensors) if t is not None]
    wanted = torch.autograd.grad(expected, [doubles[i] for i in present], grad.double())
    for i, reference in zip(present, wanted, strict=True):
        assert relative_error(grads[i], reference) < tolerance, i


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "K", "D"), [(1, 1, 16), (5, 2, 33), (17, 3, 40)])
def test_matches_reference(dtype, form, T, K, D):
    check(inputs(T, K, D, dtype, form))


def test_programs_that_take_several_tiles():
    check(inputs(1100, 1, 16, torch.float32, "wrgb"))


def test_rows_too_wide_for_sums_in_registers(monkeypatch):
    monkeypatch.setattr(combine, "MOST_PARTIAL_SUMS", 2)
    check(inputs(5, 2, 4100, torch.float32, "wrgb"))


def test_strided_inputs_and_gradients_of_stride_zero():
    tensors = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in inputs(9, 2, 20, torch.float32, "wrgb")]
    check(tensors)
    check(inputs(9, 2, 20, torch.float32, "w"), grad=torch.ones(()).expand(9, 20))


def test_no_tokens():
    check(inputs(0, 2, 20, torch.float32, "wrgb"))


def test_nan_row_spoils_no_other_row():
    tensors = inputs(9, 2, 20, torch.float32, "wrgb")
    clean, *_ = combine_forward(*tensors, 1e-5, torch.float32)
    tensors[0][3, 1, 5] = float("nan")
    out, *_ = combine_forward(*tensors, 1e-5, torch.float32)
    others = torch.arange(9) != 3
    assert torch.equal(out[others], clean[others]) and out[3].isnan().all()
