"""One command on a machine with a GPU: build, run the GPU tests, time every operator against rivals and its floor.

    python benchmarks/gpu_check.py             # under 8 minutes; writes benchmarks/results/gpu_<name>.json
    python benchmarks/gpu_check.py --dry-run   # the same code at toy sizes on the CPU, to see that it runs

The floor of an operator is the larger of its bytes over the measured copy bandwidth and its operations over the
measured bf16 rate of torch.mm. Times are medians, each run after a write of 256 MiB that empties the L2 cache, eager
and as a replayed CUDA graph. Stages that would pass the deadline are skipped and named as such in the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import site
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "moe_layers": (1,),
}
"""A Q-Former for dry runs."""
EXCELLENT = {  # tokens, experts, experts per token: fraction of the floor, forward and forward + backward
    (128, 3, 1): (0.40, 0.45),
    (128, 8, 1): (0.60, 0.60),
    (1024, 3, 1): (0.45, 0.45),
    (1024, 8, 2): (0.52, 0.50),
    (8192, 3, 1): (0.70, 0.62),
    (8192, 8, 2): (0.75, 0.66),
    (65536, 8, 2): (0.82, 0.72),
}


@dataclass
class Check:
    """What was found so far, and how much time is left."""

    deadline: float
    dry_run: bool
    results: dict = field(default_factory=dict)
    ceilings: dict = field(default_factory=dict)

    def enough_time_for(self, stage: str, seconds: float) -> bool:
        if time.monotonic() + seconds < self.deadline:
            return True
        self.results.setdefault("skipped", []).append(stage)
        print(f"skipped for lack of time: {stage}")
        return False


def build_and_test(check: Check) -> None:
    commands = {
        "build": ["-m", "pip", "install", "-q", "-e", f"{ROOT}[dev,bench]"],
        "gpu tests": ["-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"],
        "golden files": ["-m", "moe_zero.cli", "doctor", "--golden", "tests/golden", "--device", "cuda"],
    }
    for name, command in commands.items():
        start = time.monotonic()
        left = max(10.0, check.deadline - start - 150)
        try:
            run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=left)
            code, tail = run.returncode, (run.stdout + run.stderr)[-2000:]
        except subprocess.TimeoutExpired:
            code, tail = "timed out", ""
        seconds = round(time.monotonic() - start, 1)
        check.results[name] = {"exit": code, "seconds": seconds, "tail": tail}
        print(f"{name}: exit {code} after {seconds} s\n{tail if code else tail.strip().splitlines()[-1:]}")
    site.addsitedir(sysconfig.get_path("purelib"))  # what was just installed editable, seen from this process too


class Timer:
    """Median microseconds of a function, with a cold cache, on whichever device there is."""

    def __init__(self, device: str):
        import torch

        self.torch, self.cuda = torch, device == "cuda"
        self.flush = torch.empty(2**28 if self.cuda else 2**20, dtype=torch.uint8, device=device)

    def __call__(self, function: Callable, budget_s: float = 0.5) -> float:
        function()
        times, start = [], time.monotonic()
        while len(times) < 5 or (time.monotonic() - start < budget_s and len(times) < 100):
            times.append(self._once(function))
        return statistics.median(times)

    def _once(self, function: Callable) -> float:
        self.flush.zero_()
        if not self.cuda:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e6
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def graph(self, function: Callable) -> float | None:
        """The same as a CUDA graph; None where it cannot be captured."""
        if not self.cuda:
            return None
        torch = self.torch
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return self(graph.replay)


def measure_ceilings(check: Check, timer: Timer) -> None:
    import torch

    device = "cuda" if timer.cuda else "cpu"
    size = 2**29 if timer.cuda else 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if timer.cuda else 128
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    check.ceilings = {
        "bytes_per_us": 2 * size / timer(lambda: target.copy_(source)),
        "flops_per_us": 2 * n**3 / timer(lambda: a @ b),
    }
    check.results["ceilings"] = {
        "copy_TB_s": check.ceilings["bytes_per_us"] / 1e6,
        "bf16_TFLOP_s": check.ceilings["flops_per_us"] / 1e6,
    }
    print(check.results["ceilings"])


def time_rivals(check: Check, timer: Timer, name: str, bytes_moved: float, operations: float, rivals: dict) -> None:
    """Time the rivals of one operator and print them beside the floor."""
    floor = max(bytes_moved / check.ceilings["bytes_per_us"], operations / check.ceilings["flops_per_us"])
    rows = {}
    for rival, function in rivals.items():
        if not check.enough_time_for(f"{name}: {rival}", 4):
            continue
        try:
            eager, graph = timer(function), timer.graph(function)
        except Exception as error:
            rows[rival] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(f"{name:58} {rival:18} {rows[rival]['error'][:80]}")
            continue
        best = eager if graph is None else min(eager, graph)
        rows[rival] = {"eager_us": eager, "graph_us": graph, "fraction_of_floor": floor / best}
        shown = "-" if graph is None else f"{graph:.1f}"
        print(f"{name:58} {rival:18} eager {eager:10.1f} us  graph {shown:>10} us  floor/best {floor / best:.2f}")
    check.results.setdefault("operators", {})[name] = {"floor_us": floor, "rivals": rows}


def time_flat(check: Check, timer: Timer) -> None:
    """The fraction of the floor is the share of the device-to-device copy rate."""
    import torch

    from moe_zero.benchmarks import test_flat as suite
    from moe_zero.ops.flat import pack, unpack

    shapes = suite.layer_shapes() if timer.cuda else [(768,)] * 3
    cases = {"layer": shapes, "2000 tensors of 768": [(768,)] * 2000}
    for (name, shapes), dtype in itertools.product(cases.items(), (torch.float32, torch.bfloat16)):
        tensors = [t.to(timer.flush.device) for t in suite.tensors_of(shapes)]
        plan = suite.plan_of(shapes, dtype, 4)
        flat = pack(tensors, plan)
        views = suite.views_of(flat, tensors)
        moved = sum(plan.sizes) * (4 + dtype.itemsize)
        copy = torch._foreach_copy_
        packing = {"ours": partial(pack, tensors, plan, flat), "foreach_copy": partial(copy, views, tensors)}
        opening = {"ours": partial(unpack, flat, plan, tensors), "foreach_copy": partial(copy, tensors, views)}
        for what, rivals in {"pack": packing, "unpack": opening}.items():
            label = f"{what}, {name}, fp32 and {str(dtype).removeprefix('torch.')}"
            time_rivals(check, timer, label, moved, 0, rivals)
            check.results["operators"][label]["launches"] = launches(rivals["ours"])


def launches(function: Callable) -> int:
    """Kernels that one call launches on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum("kernel" in event.name for event in profile.events())


def time_gelu_ffn(check: Check, timer: Timer) -> None:
    import torch

    from moe_zero.benchmarks import test_gelu_ffn as suite

    D, F = (768, 3072) if timer.cuda else (32, 64)
    suite.HIDDEN, suite.WIDTH = D, F
    names = ["ours", "ours, separate experts", "loop over nn.Linear", "torch grouped_mm", "transformers grouped_mm"]
    if timer.cuda and importlib.util.find_spec("liger_kernel"):
        names.append(suite.LIGER)
    for (T, E, K), excellent in EXCELLENT.items():
        T = T if timer.cuda else min(T, 128)
        suite.PER_TOKEN = K
        N, weight_bytes = T * K, E * 2 * D * F * 2
        forward_flops, row_bytes = 4 * N * D * F, 2 * (T + N) * D * 2
        plain = suite.inputs(T, torch.bfloat16, experts=E)
        for mode, run, scale, goal in (
            ("forward", suite.forward, 1, excellent[0]),
            ("forward + backward", suite.forward_backward, 3, excellent[1]),
        ):
            rivals = {}
            for name in names:
                # The loop and Liger ask the device how many tokens each expert got, so that they cannot be captured.
                given = suite.arguments_of(name, plain)
                rivals[name] = lambda run=run, name=name, given=given: run(suite.RIVALS[name], *given)
            label = f"gelu_ffn {mode}, T={T} E={E} K={K}"
            time_rivals(check, timer, label, scale * (weight_bytes + row_bytes), scale * forward_flops, rivals)
            check.results["operators"][label]["excellent"] = goal


def time_small_operators(check: Check, timer: Timer) -> None:
    import torch

    from moe_zero.benchmarks import test_beam_moe, test_combine, test_gate

    device = "cuda" if timer.cuda else "cpu"
    D = 768 if timer.cuda else 32
    for T, E in ((1024, 8), (65536, 8), (65536, 64)) if timer.cuda else ((64, 8),):
        x = torch.randn(T, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        router = torch.randn(E, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        for mode, scale in ((test_gate.forward, 1), (test_gate.forward_backward, 3)):
            rivals = {n: lambda r=r, m=mode, x=x, w=router: m(r, x, w, 2) for n, r in test_gate.RIVALS.items()}
            time_rivals(check, timer, f"gate {mode.__name__}, T={T} E={E}", scale * T * D * 2, 0, rivals)
    for T in (1024, 65536) if timer.cuda else (64,):
        shapes = ((T, 2, D), (T, 2), (T, D), (D,), (D,))
        tensors = [torch.randn(s, device=device, dtype=torch.bfloat16).requires_grad_() for s in shapes]
        for mode, passes in ((test_combine.forward, 4), (test_combine.forward_backward, 11)):
            rivals = {n: lambda r=r, m=mode, t=tensors: m(r, t) for n, r in test_combine.RIVALS.items()}
            time_rivals(check, timer, f"combine {mode.__name__}, T={T} K=2", passes * T * D * 2, 0, rivals)
    B, J, R = 64, 7, 7
    scores = torch.rand(B, J, device=device)
    probs = torch.randn(B * J, R, device=device).softmax(-1)
    routes = torch.randint(0, R, (B, J, 3), device=device)
    names = [name for name in test_beam_moe.STEPS if name != "loop over samples"]
    rivals = {n: lambda r=test_beam_moe.STEPS[n]: r(scores, probs, J, routes) for n in names}
    time_rivals(check, timer, f"beam_step, B={B} J={J} R={R}", probs.numel() * 4, 0, rivals)


def time_post_route(check: Check, timer: Timer) -> None:
    import torch

    from moe_zero.benchmarks import test_beam_moe as suite

    device, G, Q, E = ("cuda", 128, 32, 8) if timer.cuda else ("cpu", 2, 4, 8)
    D, F = (suite.HIDDEN, suite.WIDTH) if timer.cuda else (32, 64)
    params = suite.expert_parameters(E, D, F, torch.bfloat16)
    x = torch.randn(G, Q, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_bytes, operations = sum(p.nbytes for p in params), 2 * G * Q * D * F * (E + 2)
    for (mode, run), scale in zip(suite.MODES.items(), (1, 3), strict=True):
        rivals = {n: lambda m=run, r=r: m(r, x, gate, *params) for n, r in suite.POST_ROUTES.items()}
        label = f"post-route {mode}, {G} groups of {Q}, E={E}, best 2"
        time_rivals(check, timer, label, scale * weight_bytes, scale * operations, rivals)


def time_qformer(check: Check, timer: Timer) -> None:
    """The whole model in bf16 at batch 4, forward and training step; the floor is that of its weights' bytes alone."""
    import torch

    from moe_zero.benchmarks import test_qformer as suite
    from moe_zero.qformer import QFormerConfig, QFormerModel
    from moe_zero.qformer.reference import qformer_reference

    for experts in (3, 8) if timer.cuda else (2,):
        if timer.cuda:
            model = suite.build(experts, torch.bfloat16)
        else:
            model = QFormerModel(QFormerConfig(**TINY, num_experts=2, num_beams=2))
        inputs = suite.batch(model)
        runs = {
            "ours": model,
            "reference": partial(qformer_reference, model),
            "compiled": torch.compile(model),
            "compiled reference": torch.compile(partial(qformer_reference, model)),
        }
        # The optimizer keeps its step on the device, so that a step can be captured.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, capturable=timer.cuda)
        weights = sum(p.numel() for p in model.parameters()) * model.query_tokens.element_size()
        forward = {name: partial(suite.forward, run, inputs) for name, run in runs.items()}
        step = {name: partial(suite.step, run, inputs, optimizer) for name, run in runs.items()}
        # A step reads and writes weights, gradients and two moments, and reads the weights for forward and backward.
        time_rivals(check, timer, f"Q-Former forward, E=N={experts}, batch 4", weights, 0, forward)
        time_rivals(check, timer, f"Q-Former training step, E=N={experts}, batch 4", 10 * weights, 0, step)


def time_zero3(check: Check, timer: Timer) -> None:
    """One rank over NCCL: what sharding adds to an unsharded step."""
    import torch
    import torch.distributed as dist

    from moe_zero.benchmarks import test_qformer as suite
    from moe_zero.qformer import QFormerConfig, QFormerLayer, QFormerModel
    from moe_zero.zero import shard

    config = QFormerConfig() if timer.cuda else QFormerConfig(**TINY)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if timer.cuda else "gloo", rank=0, world_size=1)
    try:
        model = QFormerModel(config).to(timer.flush.device)
        inputs = suite.batch(model)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-6)
        rivals = {"unsharded": timer(partial(suite.step, model, inputs, plain))}
        sharded = shard(model, QFormerLayer)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-6)
        inputs = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        rivals["ours"] = timer(partial(suite.step, sharded, inputs, optimizer))
    finally:
        dist.destroy_process_group()
    overhead = rivals["ours"] / rivals["unsharded"] - 1
    check.results["zero3, one rank"] = {"step_us": rivals, "overhead": overhead}
    print(f"ZeRO-3 with one rank: {overhead:+.1%} on a step of {rivals['unsharded']:.0f} us")


STAGES = {
    measure_ceilings: 0,
    time_flat: 10,
    time_gelu_ffn: 30,
    time_qformer: 40,
    time_zero3: 15,
    time_small_operators: 20,
    time_post_route: 10,
}
"""In the order in which one would rather have them, with the seconds that a stage needs at least."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU; writes no file")
    parser.add_argument("--no-build", action="store_true", help="measure the installed package, without its tests")
    parser.add_argument("--seconds", type=float, default=460, help="deadline (default 460)")
    options = parser.parse_args()
    check = Check(time.monotonic() + options.seconds, options.dry_run)
    if not (options.no_build or options.dry_run):
        build_and_test(check)

    import torch
    import triton

    import moe_zero

    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; use --dry-run to try the script without one")
    device = "cpu" if options.dry_run else "cuda"
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "moe_zero": moe_zero.__version__}
    check.results.update(device=name, versions=versions)
    timer = Timer(device)
    from moe_zero.benchmarks import device as measured

    measured.waits = False  # events time the work
    for stage, seconds in STAGES.items():
        if check.enough_time_for(stage.__name__, seconds):
            try:
                stage(check, timer)
            except Exception as error:  # a fault in one must not cost the others
                check.results.setdefault("failed", {})[stage.__name__] = f"{type(error).__name__}: {error}"
                print(f"{stage.__name__} failed: {type(error).__name__}: {error}")
    if not options.dry_run:
        folder = ROOT / "benchmarks" / "results"
        folder.mkdir(exist_ok=True)
        path = folder / f"gpu_{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"
        path.write_text(json.dumps(check.results, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}")
    if check.results.get("failed"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
