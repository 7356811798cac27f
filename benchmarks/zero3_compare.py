"""ZeRO-3 side by side: DDP, PyTorch's FSDP2, and `moe_zero.zero`, on the same model, data and machine.

    python benchmarks/zero3_compare.py                            # the full-size Q-Former, 2 ranks, one thread each
    python benchmarks/zero3_compare.py --methods zero3 fsdp2 --ranks 2 --steps 5 --json results.json
    python benchmarks/zero3_compare.py --plot docs/zero3_memory.png   # peak memory at 1 to 4 ranks

Each method runs in processes of its own. Per rank: median seconds of a step (forward, backward, AdamW), peak resident
memory, bytes sent over the loopback device (from the kernel's counters, so be alone on the machine), payload of gathers
and reductions, and the losses, which must be the same. Beside the peak stands what `moe-zero plan` predicts, where it
does. All methods run under one setting of malloc, which docs/zero3.md explains. As root, `unshare -n` before
the command (and `ip link set lo up` inside) gives it a loopback device that nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

MIB = 1 << 20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "2097152"}
PLANNED = {"ddp": ("fp32", "DDP", True), "zero3": ("fp32", "ZeRO-3", True), "zero3_keep": ("fp32", "ZeRO-3", False),
           "zero3_bf16": ("bf16", "ZeRO-3", True)}  # fmt: skip
"""Precision, strategy and resharding of the methods that can be planned."""
METHODS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2, per layer",
    "fsdp2_keep": "FSDP2, reshard_after_forward=False",
    "fsdp2_bf16": "FSDP2, bf16",
    "zero3": "moe_zero",
    "zero3_keep": "moe_zero, reshard_after_forward=False",
    "zero3_bf16": "moe_zero, bf16",
}
QUERIES, TEXT, IMAGE_TOKENS, BATCH = 32, 13, 257, 2


def parallel(method: str, model: torch.nn.Module):
    """(the model to call, what the optimizer gets, statistics or None)"""
    from moe_zero.qformer import QFormerLayer

    if method == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        return wrapped, wrapped.parameters(), None
    if method.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"reshard_after_forward": False} if method == "fsdp2_keep" else {}
        if method == "fsdp2_bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in (model.embeddings, *model.encoder.layer):
            fully_shard(layer, **options)
        return fully_shard(model, **options), model.parameters(), None
    from moe_zero.zero import shard

    sharded = shard(
        model,
        [QFormerLayer, "embeddings"],
        reshard_after_forward=method != "zero3_keep",
        compute_dtype=torch.bfloat16 if method == "zero3_bf16" else None,
    )
    return sharded, sharded.parameters(), sharded.statistics


def qformer_config(small: bool):
    from moe_zero.qformer import QFormerConfig

    if small:
        return QFormerConfig(
            num_hidden_layers=4, moe_layers=(2, 3), hidden_size=192, num_attention_heads=4, intermediate_size=768
        )
    return QFormerConfig()


def planned(method: str, ranks: int, small: bool):
    """What `moe-zero plan` says about a method, or None."""
    from moe_zero.qformer import QFormerLayer
    from moe_zero.recipes.plan_command import DTYPES, plan_qformer

    if method not in PLANNED:
        return None
    precision, strategy, reshard = PLANNED[method]
    sizes = {"batch": BATCH, "image_tokens": IMAGE_TOKENS, "text_tokens": TEXT}
    options = {"layers": [QFormerLayer, "embeddings"], "reshard_after_forward": reshard}
    estimates = plan_qformer(qformer_config(small), ranks, "adamw", DTYPES[precision], **sizes, **options)
    return next(each for each in estimates if each.strategy == strategy)


def loopback_bytes() -> int:
    with open("/proc/self/net/dev") as file:  # of this process's network namespace
        loopback = next(line for line in file if line.strip().startswith("lo:"))
    return int(loopback.split()[9])


def measure(method: str, warm_up: int, steps: int, small: bool) -> dict:
    from moe_zero.benchmarks.device import peak_mib
    from moe_zero.qformer import QFormerModel

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = qformer_config(small)
    model, parameters, traffic = parallel(method, QFormerModel(config))
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    image = torch.randn(BATCH, IMAGE_TOKENS, config.encoder_width, generator=generator)
    text = torch.randint(1, config.vocab_size, (BATCH, TEXT), generator=generator)
    projection = torch.randn(BATCH, QUERIES + TEXT, config.hidden_size, generator=generator)
    if method.endswith("bf16"):
        image = image.to(torch.bfloat16)

    seconds, losses, sent = [], [], []
    for step in range(warm_up + steps):
        if traffic is not None and step == warm_up:
            traffic.reset()
        dist.barrier()
        before, start = loopback_bytes(), time.perf_counter()
        optimizer.zero_grad()
        out = model(image_features=image, input_ids=text)
        loss = (out.last_hidden_state.float() * projection).mean()
        loss.backward()
        optimizer.step()
        elapsed = time.perf_counter() - start
        dist.barrier()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if step >= warm_up:
            seconds.append(elapsed)
            sent.append((loopback_bytes() - before) / dist.get_world_size())
    result = {
        "method": METHODS[method],
        "seconds": statistics.median(seconds),
        "peak_mib": peak_mib(),
        "sent_mib": statistics.median(sent) / MIB,
        "losses": losses,
    }
    if traffic is not None:
        for kind, moved in traffic.total.items():
            result[f"{kind}_mib"] = moved.bytes / steps / MIB
            result[f"{kind}_wait_seconds"] = moved.wait_seconds / steps
    return result


def launch(method: str, ranks: int, args: argparse.Namespace) -> dict:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        __file__,
    ]
    command += ["--rank-of", method, "--steps", str(args.steps), "--warm-up", str(args.warm_up)]
    command += ["--small"] if args.small else []
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=args.timeout,
        env={**MALLOC, **os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise SystemExit(f"{METHODS[method]} failed with exit status {run.returncode}")
    plan = planned(method, ranks, args.small)
    expected = {} if plan is None else {"planned_peak_mib": plan.peak / MIB, "planned_sent_mib": plan.sent / MIB}
    return {**json.loads(lines[-1]), "ranks": ranks, **expected}


def run_all(runs: list[tuple[str, int]], args: argparse.Namespace) -> list[dict]:
    """Runs (method, ranks) one after the other and prints a table."""
    print(f"{'':40}{'ranks':>6}{'step, s':>9}{'peak MiB':>10}{'planned':>9}{'sent MiB':>10}{'gather MiB':>12}"
          f"{'reduce MiB':>12}{'last loss':>14}")  # fmt: skip
    results = []
    for method, ranks in runs:
        results.append(launch(method, ranks, args))
        r = results[-1]
        moved = "".join(f"{r.get(f'{kind}_mib', float('nan')):12.0f}" for kind in ("all_gather", "reduce_scatter"))
        print(
            f"{r['method']:40}{ranks:6}{r['seconds']:9.2f}{r['peak_mib']:10.0f}"
            f"{r.get('planned_peak_mib', float('nan')):9.0f}{r['sent_mib']:10.0f}{moved}{r['losses'][-1]:14.8f}",
            flush=True,
        )
    return results


def draw(results: list[dict], small: bool, file: str) -> None:
    """Peak memory against the number of ranks: measured, planned, and the equation for a model state alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from moe_zero.recipes.plan_command import count_parameters

    ranks = [r["ranks"] for r in results]
    psi = count_parameters(qformer_config(small))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(ranks, [r["peak_mib"] for r in results], "o", label="measured peak of resident memory")
    axes.plot(ranks, [r["planned_peak_mib"] for r in results], "_", ms=22, mew=2, label="planned by moe-zero plan")
    many = [1 + i / 20 for i in range(20 * (max(ranks) - 1) + 1)]
    axes.plot(many, [16 * psi / n / MIB for n in many], "-", lw=1, label=r"model states alone, $(4 + 4 + 8)\,\Psi / N$")
    axes.set(xlabel="ranks N", ylabel="MiB on each rank", xticks=ranks, ylim=(0, None))
    axes.set_title(f"{results[0]['method']}: {psi / 1e6:.1f} M parameters, AdamW, fp32")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    from moe_zero.benchmarks.device import multiplies_bf16

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="default: all, but bf16 only where the processor multiplies it"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one method")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--plot", help="measure moe_zero at 1 to 4 ranks instead, and draw their memory to this file")
    parser.add_argument("--rank-of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        result = measure(args.rank_of, args.warm_up, args.steps, args.small)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        dist.destroy_process_group()
        return
    if args.methods is None:
        args.methods = [method for method in METHODS if multiplies_bf16() or not method.endswith("bf16")]
    if args.plot:
        results = run_all([("zero3", ranks) for ranks in range(1, 5)], args)
        draw(results, args.small, args.plot)
    else:
        results = run_all([(method, args.ranks) for method in args.methods], args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
