"""Weighted sum + residual + LayerNorm against eager PyTorch and torch.compile, on the CPU or a GPU."""

import pytest
import torch

from moe_zero.benchmarks.device import DEVICE, synchronize
from moe_zero.ops.combine import combine, combine_reference

HIDDEN = 768
ROUNDS = 100 if DEVICE == "cuda" else 20
RIVALS = {"ours": combine, "reference": combine_reference, "compiled reference": torch.compile(combine_reference)}


def forward(run, tensors):
    with torch.no_grad():
        out = run(*tensors)
    synchronize()
    return out


def forward_backward(run, tensors):
    for tensor in tensors:
        tensor.grad = None
    run(*tensors).backward(tensors[2].detach())
    synchronize()


@pytest.mark.parametrize("mode", [forward, forward_backward])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("rival", RIVALS)
def test_combine(benchmark, rival, tokens, dtype, mode):
    benchmark.group = f"combine {mode.__name__}, T={tokens} K=2 D={HIDDEN}, {dtype}, {DEVICE}"
    torch.manual_seed(0)
    shapes = ((tokens, 2, HIDDEN), (tokens, 2), (tokens, HIDDEN), (HIDDEN,), (HIDDEN,))
    tensors = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
    expected = combine_reference(*(t.float() for t in tensors))
    assert (forward(RIVALS[rival], tensors).float() - expected).norm() < 2e-2 * expected.norm()
    benchmark.pedantic(mode, args=(RIVALS[rival], tensors), rounds=ROUNDS, warmup_rounds=2)
