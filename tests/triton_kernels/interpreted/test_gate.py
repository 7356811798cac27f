import pytest
import torch

from moe_zero.ops.gate import gate_reference
from moe_zero.triton_kernels.gate import gate_backward, gate_forward
from moe_zero.triton_kernels.tuning import GateConfig

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(out, reference):
    reference = reference.double()
    return ((out.double() - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def inputs(T, Q, D, E, dtype, router_dtype=None):
    torch.manual_seed(0)
    return torch.randn(T, Q, D).to(dtype), torch.randn(E, D).to(router_dtype or dtype)


def check(x, router, k, renormalize, config=None):
    """Forward and every gradient against autograd through the fp64 reference."""
    out = gate_forward(x, router, k, renormalize, config)
    x64, router64 = x.double().requires_grad_(), router.double().requires_grad_()
    expected = gate_reference(x64, router64, k, renormalize=renormalize)
    weights, ids, probs, counts, importance, logsumexp = out
    assert torch.equal(ids, expected.ids)
    assert torch.equal(counts, expected.counts)
    for name, value in (("weights", weights), ("probs", probs), ("importance", importance), ("logsumexp", logsumexp)):
        assert relative_error(value, getattr(expected, name)) < 1e-5, name

    floats = [expected.weights, expected.probs, expected.importance, expected.logsumexp]
    grads = [torch.randn_like(f, dtype=torch.float32) for f in floats]
    torch.autograd.backward(floats, [g.double() for g in grads])
    grad_x, grad_router = gate_backward(*grads, x, router, ids, probs, renormalize, config)
    assert relative_error(grad_x, x64.grad) < TOLERANCE[x.dtype]
    assert relative_error(grad_router, router64.grad) < TOLERANCE[router.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("T", "Q", "D", "E", "k"),
    [
        (1, 1, 16, 1, 1),
        (2, 1, 7, 2, 2),
        (17, 1, 33, 3, 2),
        (15, 1, 130, 8, 1),
        (33, 1, 48, 20, 20),
        (3, 5, 33, 7, 2),
        (2, 40, 20, 3, 1),
    ],
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_matches_reference(dtype, T, Q, D, E, k, renormalize):
    check(*inputs(T, Q, D, E, dtype), k, renormalize)


def test_256_experts():
    check(*inputs(5, 1, 24, 256, torch.float32), 8, True)


def test_router_in_fp32_with_tokens_in_bf16():
    check(*inputs(9, 1, 40, 4, torch.bfloat16, torch.float32), 2, False)


def test_several_programs_split_the_tokens():
    config = GateConfig(block_t=16, block_e=16, block_d=16, block_q=1, num_warps=4, num_stages=2)
    check(*inputs(70, 1, 40, 5, torch.float32), 2, True, config)


def test_strided_tokens_and_router():
    x, router = inputs(12, 3, 20, 4, torch.float32)
    x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    router = torch.stack([router, router], 2)[..., 0]
    assert not x.is_contiguous() and router.stride(1) == 2
    check(x, router, 2, False)


def test_offset_beyond_2_to_the_31_elements():
    # Rows 2^31 elements apart in an allocation whose untouched pages cost nothing.
    stride = 2**31 + 8
    storage = torch.empty(stride + 20, dtype=torch.float16)
    x = storage.as_strided((2, 1, 20), (stride, 1, 1))
    x.copy_(torch.randn(2, 1, 20))
    check(x, torch.randn(3, 20).half(), 1, False)


def test_no_tokens():
    x, router = inputs(0, 1, 8, 3, torch.float32)
    weights, ids, probs, counts, importance, _ = gate_forward(x, router, 2, True)
    assert weights.shape == ids.shape == (0, 2)
    assert counts.tolist() == [0, 0, 0] and importance.tolist() == [0, 0, 0]
    zeros = (torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(3), torch.zeros(0))
    grad_x, grad_router = gate_backward(*zeros, x, router, ids, probs, True)
    assert grad_x.shape == x.shape and torch.equal(grad_router, torch.zeros_like(router))


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_nan_row_spoils_no_other_row_and_takes_distinct_experts(nan):
    x, router = inputs(6, 1, 20, 5, torch.float32)
    clean = gate_forward(x, router, 3, True)
    x[2, 0, 4] = nan
    weights, ids, probs, *_ = gate_forward(x, router, 3, True)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(ids[others], clean[1][others]) and torch.equal(weights[others], clean[0][others])
    assert probs[2].isnan().all()
    assert len(set(ids[2].tolist())) == 3 and ids.min() >= 0 and ids.max() < 5


def test_ties_resolve_as_a_stable_sort():
    x = torch.randn(4, 1, 8)
    router = torch.randn(2, 8)[[0, 1, 0, 1, 0]]
    _, ids, *_ = gate_forward(x, router, 5, False)
    expected = (x[:, 0] @ router.T).sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(ids, expected)
    _, ids, *_ = gate_forward(torch.zeros(3, 1, 8), -router, 3, False)
    assert ids.tolist() == [[0, 1, 2]] * 3
