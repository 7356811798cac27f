"""The gate against eager PyTorch and torch.compile, forward and backward, on the CPU or a GPU."""

import pytest
import torch

from moe_zero.benchmarks.device import DEVICE, synchronize
from moe_zero.ops.gate import gate, gate_reference

HIDDEN = 768
ROUNDS = 100 if DEVICE == "cuda" else 20


def topk(x, router, k, *, renormalize):
    """The usual code: topk instead of a stable sort, statistics by one-hot."""
    logits = (x.mean(1) if x.dim() == 3 else x).float() @ router.float().T
    probs = logits.softmax(-1)
    weights, ids = probs.topk(k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    counts = torch.nn.functional.one_hot(ids, len(router)).sum((0, 1))
    return weights, ids, probs, counts, probs.sum(0), logits.logsumexp(-1)


RIVALS = {
    "ours": gate,
    "reference": gate_reference,
    "topk": topk,
    "compiled topk": torch.compile(topk),
}


def forward(run, x, router, k):
    with torch.no_grad():
        out = run(x, router, k, renormalize=True)
    synchronize()
    return out


def forward_backward(run, x, router, k):
    x.grad = router.grad = None
    weights, _, _, _, importance, _ = run(x, router, k, renormalize=True)
    (weights.square().sum() + importance.square().sum()).backward()
    synchronize()


@pytest.mark.parametrize("mode", [forward, forward_backward])
@pytest.mark.parametrize(("shape", "experts"), [((64,), 8), ((4096,), 8), ((4096,), 64), ((64, 32), 8)], ids=str)
@pytest.mark.parametrize("rival", RIVALS)
def test_gate(benchmark, rival, shape, experts, mode):
    benchmark.group = f"gate {mode.__name__}, x {[*shape, HIDDEN]}, E={experts}, K=2, fp32, {DEVICE}"
    torch.manual_seed(0)
    x = torch.randn(*shape, HIDDEN, device=DEVICE, requires_grad=True)
    router = torch.randn(experts, HIDDEN, device=DEVICE, requires_grad=True)
    run = RIVALS[rival]
    # Logits of 20 and more, summed in another order, move a probability by some 1e-5.
    expected = gate_reference(x, router, 2, renormalize=True).weights
    torch.testing.assert_close(forward(run, x, router, 2)[0], expected, atol=1e-4, rtol=1e-4)
    benchmark.pedantic(mode, args=(run, x, router, 2), rounds=ROUNDS, warmup_rounds=2)
