"""Flat buffers on a GPU against the eager reference on the CPU, and in CUDA graphs."""

import pytest
import torch

from moe_zero import _extensions
from moe_zero.ops.flat import FlatPlan, pack, pack_reference, sum_rows, sum_rows_reference, unpack, unpack_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or _extensions.ops_cuda is None, reason="needs a GPU and _ops_cuda"
    ),
]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def odd_tensors(dtype):
    """Dense, misaligned, transposed, sliced, empty, scalar, and one of many tiles."""
    return [
        torch.randn(13, 5).to(dtype),
        torch.randn(64).to(dtype)[3:20],
        torch.randn(7, 9).to(dtype).t(),
        torch.randn(6, 10, 4).to(dtype)[1:5, ::3, 1:],
        torch.empty(0, 3, dtype=dtype),
        torch.randn(()).to(dtype),
        torch.randn(301, 3001).to(dtype),
    ]


def on_gpu(tensor):
    """The same values with the same strides and alignment."""
    offset = tensor.storage_offset()
    storage = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cuda")
    storage.copy_(torch.as_strided(tensor, storage.shape, (1,), 0))
    return torch.as_strided(storage, tensor.shape, tensor.stride(), offset)


@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference_on_the_cpu(dtype, flat_dtype):
    tensors = odd_tensors(dtype)
    plan = FlatPlan([t.numel() for t in tensors], [flat_dtype] * 7, [True, False] * 3 + [True], 3)
    for scale in (1.0, 1 / 3):
        stats, expected_stats = torch.zeros(2, device="cuda").double(), torch.zeros(2).double()
        expected = pack_reference(tensors, plan, scale=scale, stats=expected_stats)
        flat = pack([on_gpu(t) for t in tensors], plan, scale=scale, stats=stats)
        assert torch.equal(flat.cpu(), expected)
        torch.testing.assert_close(stats.cpu(), expected_stats, rtol=1e-12, atol=0)
    for accumulate in (False, True):
        targets, expected_targets = [on_gpu(t) for t in tensors], [on_gpu(t).cpu() for t in tensors]
        unpack(flat, plan, targets, accumulate=accumulate)
        unpack_reference(expected, plan, expected_targets, accumulate=accumulate)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(targets, expected_targets, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_sum_rows_equals_reference_on_the_cpu(dtype, out_dtype):
    rows, out = torch.randn(4, 10_001).to(dtype), torch.randn(10_001).to(out_dtype)
    result, stats, expected_stats = out.cuda(), torch.zeros(2, device="cuda"), torch.zeros(2)
    sum_rows(rows.cuda(), result, scale=0.25, accumulate=True, stats=stats)
    sum_rows_reference(rows, out, scale=0.25, accumulate=True, stats=expected_stats)
    assert torch.equal(result.cpu(), out)
    torch.testing.assert_close(stats.cpu(), expected_stats)


def test_replays_in_a_cuda_graph():
    tensors = [torch.randn(1000, device="cuda"), torch.randn(33, device="cuda")]
    targets = [torch.zeros_like(t) for t in tensors]
    plan = FlatPlan([1000, 33], ["bfloat16"] * 2, [True] * 2, 2)
    flat, stats = pack(tensors, plan), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack(tensors, plan, flat, stats=stats)
        unpack(flat, plan, targets)
    for tensor in tensors:
        tensor.normal_()
    graph.replay()
    assert all(torch.equal(a, b.bfloat16().float()) for a, b in zip(targets, tensors, strict=True))
    assert stats[0] > 0


def test_thousands_of_tensors_take_one_launch():
    tensors = [torch.randn(768, device="cuda") for _ in range(2000)]
    plan = FlatPlan([768] * 2000, ["float32"] * 2000, [True] * 2000, 2)
    flat = pack(tensors, plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pack(tensors, plan, flat)
        unpack(flat, plan, tensors)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "pack_kernel" in event.name]
    assert len(kernels) == 2


def test_tensors_on_different_devices_are_refused():
    plan = FlatPlan([4, 4], ["float32"] * 2, [True] * 2, 1)
    with pytest.raises(ValueError, match=r"tensors\[1\] is on cpu, but out is on cuda"):
        pack([torch.ones(4, device="cuda"), torch.ones(4)], plan)
