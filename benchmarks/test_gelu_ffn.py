"""The experts' feed-forward against everything a user could write or install instead, on the CPU or a GPU.

Rivals stand in one group and run in one session; compare medians. ``memory`` prints the peak of a training step.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_zero.benchmarks.device import DEVICE, expert_parameters, forward, forward_backward, multiplies_bf16
from moe_zero.ops.gelu_ffn import gelu_ffn, gelu_ffn_reference

HIDDEN, WIDTH = (768, 3072) if DEVICE == "cuda" else (384, 1536)
EXPERTS, PER_TOKEN = 8, 2
ROUNDS = 50 if DEVICE == "cuda" else 15


def inputs(tokens: int, dtype: torch.dtype, experts: int = EXPERTS) -> tuple:
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=dtype, requires_grad=True)
    probs = torch.randn(tokens, experts, device=DEVICE).softmax(-1)
    weights, ids = probs.topk(PER_TOKEN)
    return x, ids, weights.detach().requires_grad_(), *expert_parameters(experts, HIDDEN, WIDTH, dtype)


def loop(x, ids, weights, w1, b1, w2, b2):
    """What most published code does: per expert, index the tokens, two linear layers, index_add."""
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, place = torch.where(ids == e)
        h = F.gelu(F.linear(x[token], w1[e], b1[e]))
        y = F.linear(h, w2[e], b2[e]) * weights[token, place, None].to(x.dtype)
        out = out.index_add(0, token, y)
    return out


def separate(arguments: tuple) -> tuple:
    """The same inputs with the parameters of each expert as leaves of their own, as in modules of nn.Linear."""
    *tokens, w1, b1, w2, b2 = arguments
    return *tokens, *([t.detach().clone().requires_grad_() for t in p] for p in (w1, b1, w2, b2))


def grouped_mm(x, ids, weights, w1, b1, w2, b2):
    """Sort by expert, torch's grouped product twice, scatter back."""
    order = ids.flatten().argsort(stable=True)
    experts = ids.flatten()[order]
    offsets = torch.histc(experts.float(), len(w1), 0, len(w1) - 1).cumsum(0).int()
    token = order // ids.shape[1]
    h = F.gelu(F.grouped_mm(x[token], w1.transpose(1, 2), offs=offsets) + b1[experts])
    y = F.grouped_mm(h, w2.transpose(1, 2), offs=offsets) + b2[experts]
    y = y * weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


class _TransformersExperts(torch.nn.Module):
    """The attributes that transformers' experts backends read."""

    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = False, True, False, False, False
    act_fn = staticmethod(F.gelu)

    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        self.num_experts = len(w1)
        self.__dict__.update(up_proj=w1, up_proj_bias=b1, down_proj=w2, down_proj_bias=b2)


def transformers_backend(name, x, ids, weights, *params):
    from transformers.integrations import moe

    forward = getattr(moe, f"{name}_experts_forward")
    return forward(_TransformersExperts(*params), x, ids, weights)


def liger(x, ids, weights, gate_up, down):
    """Liger's fused experts, which are SwiGLU without biases."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), weights)


def liger_reference(x, ids, weights, gate_up, down):
    gate, up = torch.einsum("td,efd->tef", x, gate_up).chunk(2, -1)
    y = torch.einsum("tef,edf->ted", F.silu(gate) * up, down)
    return (y.take_along_dim(ids[..., None], 1) * weights[..., None]).sum(1)


def for_liger(arguments: tuple) -> tuple:
    """The same tokens with SwiGLU experts of two thirds the width: as many weights and operations as ours."""
    x, ids, weights, w1, _, w2, _ = arguments
    width = 2 * w1.shape[1] // 3
    gate_up = torch.cat([w1[:, :width], w1[:, -width:]], 1)
    return x, ids, weights, *(w.detach().contiguous().requires_grad_() for w in (gate_up, w2[:, :, :width]))


LIGER = "Liger, SwiGLU of equal size"
RIVALS = {
    "ours": gelu_ffn,
    "ours, separate experts": gelu_ffn,
    "loop over nn.Linear": loop,
    "reference": gelu_ffn_reference,
    "compiled reference": torch.compile(gelu_ffn_reference),
    "torch grouped_mm": grouped_mm,
    "transformers grouped_mm": partial(transformers_backend, "grouped_mm"),
    "transformers batched_mm": partial(transformers_backend, "batched_mm"),
    LIGER: liger,
}


def measure(benchmark, function, *arguments):
    benchmark.pedantic(function, args=arguments, rounds=ROUNDS, warmup_rounds=2)


def arguments_of(name: str, arguments: tuple) -> tuple:
    """The inputs in the form that a rival takes them."""
    if name == LIGER:
        return for_liger(arguments)
    return separate(arguments) if name in ("loop over nn.Linear", "ours, separate experts") else arguments


def rival_or_skip(name: str, tokens: int, dtype: torch.dtype) -> tuple:
    """A rival and its arguments, after a look at its result."""
    if dtype == torch.bfloat16 and tokens > 64 and not multiplies_bf16():
        pytest.skip("this processor has no bf16 products: most rivals would take minutes")
    if name == "transformers batched_mm" and tokens > 64:
        pytest.skip("copies the weights once per pair of token and expert: does not fit in memory")
    if name.startswith("transformers"):
        pytest.importorskip("transformers", minversion="5.0", reason="experts backends came with transformers 5")
    if name == LIGER:
        pytest.importorskip("liger_kernel.ops.fused_moe", reason="liger-kernel is not installed", exc_type=ImportError)
        if DEVICE != "cuda":
            pytest.skip("Liger's kernels need a GPU")
    arguments = arguments_of(name, inputs(tokens, dtype))
    try:
        out = RIVALS[name](*arguments)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"does not run here: {str(error).splitlines()[0]}")
    reference = liger_reference if name == LIGER else gelu_ffn_reference
    x, ids, weights, *params = arguments if name == LIGER else inputs(tokens, dtype)
    expected = reference(x.float(), ids, weights, *(p.float() for p in params))
    assert (out.float() - expected).norm() < 2e-2 * expected.norm()
    return RIVALS[name], *arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("rival", RIVALS)
def test_forward(benchmark, rival, tokens, dtype):
    benchmark.group = f"gelu_ffn forward, T={tokens} E={EXPERTS} K={PER_TOKEN} D={HIDDEN} F={WIDTH}, {dtype}, {DEVICE}"
    measure(benchmark, forward, *rival_or_skip(rival, tokens, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("rival", RIVALS)
def test_forward_backward(benchmark, rival, tokens, dtype):
    benchmark.group = (
        f"gelu_ffn forward + backward, T={tokens} E={EXPERTS} K={PER_TOKEN} D={HIDDEN} F={WIDTH}, {dtype}, {DEVICE}"
    )
    measure(benchmark, forward_backward, *rival_or_skip(rival, tokens, dtype))


PEAK = """
import sys, torch
sys.path.insert(0, {folder!r})
from moe_zero.benchmarks.device import peak_mib
from test_gelu_ffn import RIVALS, arguments_of, forward_backward, inputs
arguments = arguments_of({rival!r}, inputs(4096, torch.float32))
before = peak_mib()
forward_backward(RIVALS[{rival!r}], *arguments)
print(peak_mib() - before)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="measures the memory of a CPU process")
def test_memory(benchmark, capsys):
    """Growth of the process's peak over one training step at T=4096, ours against the loop, each in a fresh process."""

    def peak(rival):
        code = PEAK.format(folder=str(Path(__file__).parent), rival=rival)
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    ours, rival = benchmark.pedantic(lambda: (peak("ours, separate experts"), peak("loop over nn.Linear")), rounds=1)
    benchmark.extra_info.update(ours_mib=ours, loop_mib=rival)
    with capsys.disabled():
        print(f"\npeak of forward + backward at T=4096: ours {ours:.0f} MiB, loop {rival:.0f} MiB")
    assert ours < rival
