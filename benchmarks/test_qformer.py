"""The whole Q-Former at full size: against the published order of operations, and dense against transformers'.

Rivals stand in one group and run in one session; ratios are of medians. Peak memory of a training step is printed, and
stands in ``extra_info`` of ``--benchmark-json``.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_zero.benchmarks.device import DEVICE, multiplies_bf16, synchronize
from moe_zero.qformer import QFormerConfig, QFormerModel
from moe_zero.qformer.reference import qformer_reference

BATCH, TEXT, IMAGE = 4, 13, 257
NEEDS_BF16 = pytest.mark.skipif(
    not multiplies_bf16(), reason="this processor has no bf16 products; fp32 is eight times as fast"
)
BF16 = pytest.param(torch.bfloat16, id="bf16", marks=NEEDS_BF16)


def build(experts: int, dtype: torch.dtype = torch.float32) -> QFormerModel:
    torch.manual_seed(0)
    return QFormerModel(QFormerConfig(num_experts=experts, num_beams=experts)).to(DEVICE, dtype)


def batch(model: QFormerModel, size: int = BATCH) -> dict[str, torch.Tensor]:
    config, dtype = model.config, model.query_tokens.dtype
    return {
        "query_embeds": model.query_tokens.detach().expand(size, -1, -1),
        "input_ids": torch.randint(1, config.vocab_size, (size, TEXT), device=DEVICE),
        "attention_mask": torch.ones(size, TEXT, dtype=torch.int64, device=DEVICE),
        "encoder_hidden_states": torch.randn(size, IMAGE, config.encoder_width, device=DEVICE, dtype=dtype),
    }


def forward(run, inputs) -> torch.Tensor:
    with torch.no_grad():
        output = run(**inputs)[0]
    synchronize()
    return output


def step(run, inputs, optimizer, keep_gradients: bool = False) -> None:
    optimizer.zero_grad(set_to_none=not keep_gradients)
    run(**inputs)[0].float().square().mean().backward()
    optimizer.step()
    synchronize()


def measure(benchmark, function, *arguments, rounds: int = 7) -> None:
    rounds = 30 if DEVICE == "cuda" else rounds
    benchmark.pedantic(function, args=arguments, rounds=rounds, warmup_rounds=1)


@pytest.mark.parametrize("experts", [3, 8])
@pytest.mark.parametrize("rival", ["reference", "ours", pytest.param("ours-bf16", marks=NEEDS_BF16)])
def test_forward(benchmark, rival, experts):
    benchmark.group = f"forward, E=N={experts}, batch {BATCH}, {DEVICE}"
    model = build(experts, torch.bfloat16 if rival == "ours-bf16" else torch.float32).eval()
    run = partial(qformer_reference, model) if rival == "reference" else model
    measure(benchmark, forward, run, batch(model))


@pytest.mark.parametrize("experts", [3, 8])
@pytest.mark.parametrize("rival", ["reference", "ours"])
def test_training_step(benchmark, rival, experts):
    benchmark.group = f"training step with SGD, E=N={experts}, batch {BATCH}, {DEVICE}"
    model = build(experts)
    run = partial(qformer_reference, model) if rival == "reference" else model
    measure(benchmark, step, run, batch(model), torch.optim.SGD(model.parameters(), lr=1e-6))


MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
from functools import partial
from moe_zero.benchmarks.device import peak_above, peak_mib
from moe_zero.qformer import QFormerLayer
from moe_zero.qformer.reference import qformer_reference
from moe_zero.zero.plan import activation_bytes
import test_qformer as t
model = t.build({experts})
run = partial(qformer_reference, model) if {reference} else model
inputs, optimizer = t.batch(model), torch.optim.SGD(model.parameters(), lr=1e-6)
step = partial(t.step, run, inputs, optimizer, keep_gradients=True)
step()
step()
added = peak_above(step)
held = activation_bytes(model, QFormerLayer, lambda model: run(**inputs)[0])
print(added, sum(held.values()) / 2**20, peak_mib())
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="measures the resident memory of a process, which a GPU's is not")
@pytest.mark.parametrize("experts", [3, 8])
def test_memory_of_a_training_step(benchmark, experts, capsys):
    """The peak of a step above weights and gradients, which are there all the time; what forward keeps for backward;
    and the whole process, libraries included. Each rival in a process of its own.
    """
    benchmark.group = f"memory of a training step, E=N={experts}"
    figures = {}
    for rival in ("ours", "reference"):
        script = MEMORY.format(folder=str(Path(__file__).parent), experts=experts, reference=rival == "reference")
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
        figures[rival] = [float(figure) for figure in run.stdout.split()]
    names = ("peak of a step above weights and gradients", "held for backward", "process")
    with capsys.disabled():
        for what, ours, reference in zip(names, *figures.values(), strict=True):
            benchmark.extra_info[f"{what}, MiB"] = f"{ours:.0f} of {reference:.0f} ({ours / reference:.2f} x)"
            print(f"\n{what}, E=N={experts}: {ours:.0f} of {reference:.0f} MiB, {ours / reference:.2f} x")
    benchmark.pedantic(lambda: None)


DENSE = [  # (rival, batch): compiling takes a minute for each size
    *((rival, size) for size in (1, 4, 32) for rival in ("transformers", "ours")),
    *((rival, BATCH) for rival in ("transformers, compiled", "ours, compiled")),
]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), BF16])
@pytest.mark.parametrize("mode", ["forward", "training step"])
@pytest.mark.parametrize(("rival", "size"), DENSE)
def test_dense(benchmark, rival, mode, size, dtype):
    transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")
    compiled = rival.endswith("compiled")
    label = f"dense {mode}, {'compiled, ' if compiled else ''}batch {size}"
    benchmark.group = f"{label}, {str(dtype).removeprefix('torch.')}, {DEVICE}"
    ours = build(1, dtype)
    inputs, model = batch(ours, size), ours
    if rival.startswith("transformers"):
        config = transformers.InstructBlipQFormerConfig(
            vocab_size=ours.config.vocab_size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        model = transformers.InstructBlipQFormerModel(config).to(DEVICE, dtype)
        queries = torch.ones(size, ours.config.num_query_tokens, dtype=torch.int64, device=DEVICE)
        inputs["attention_mask"] = torch.cat([queries, inputs["attention_mask"]], dim=1)
    model.train(mode != "forward")
    run = torch.compile(model) if compiled else model
    rounds = 3 if size > BATCH else 7
    if mode == "forward":
        measure(benchmark, forward, run, inputs, rounds=rounds)
    else:
        measure(benchmark, step, run, inputs, torch.optim.SGD(model.parameters(), lr=1e-6), rounds=rounds)
