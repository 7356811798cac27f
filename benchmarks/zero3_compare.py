"""ZeRO-3 side by side: DDP, PyTorch's FSDP2, and `moe_zero.zero`, on the same model, data and machine.

    python benchmarks/zero3_compare.py                            # the full-size Q-Former, 2 ranks, one thread each
    python benchmarks/zero3_compare.py --methods zero3 fsdp2 --ranks 2 --steps 5 --json results.json

Each method runs in processes of its own. Per rank: median seconds of a step (forward, backward, AdamW), peak resident
memory, bytes sent over the loopback device (from the kernel's counters, so be alone on the machine), payload of gathers
and reductions, and the losses, which must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

MIB = 1 << 20
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
        for layer in model.encoder.layer:
            fully_shard(layer, **options)
        return fully_shard(model, **options), model.parameters(), None
    from moe_zero.zero import shard

    sharded = shard(
        model,
        QFormerLayer,
        reshard_after_forward=method != "zero3_keep",
        compute_dtype=torch.bfloat16 if method == "zero3_bf16" else None,
    )
    return sharded, sharded.parameters(), sharded.statistics


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def loopback_bytes() -> int:
    with open("/sys/class/net/lo/statistics/tx_bytes") as file:
        return int(file.read())


def measure(method: str, warm_up: int, steps: int, small: bool) -> dict:
    from moe_zero.qformer import QFormerConfig, QFormerModel

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = QFormerConfig(num_hidden_layers=4, moe_layers=(2, 3), hidden_size=192, num_attention_heads=4,
                           intermediate_size=768) if small else QFormerConfig()  # fmt: skip
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
        "peak_mib": resident_mib(),
        "sent_mib": statistics.median(sent) / MIB,
        "losses": losses,
    }
    if traffic is not None:
        for kind, moved in traffic.total.items():
            result[f"{kind}_mib"] = moved.bytes / steps / MIB
            result[f"{kind}_wait_seconds"] = moved.wait_seconds / steps
    return result


def launch(method: str, args: argparse.Namespace) -> dict:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={args.ranks}",
        __file__,
    ]
    command += ["--rank-of", method, "--steps", str(args.steps), "--warm-up", str(args.warm_up)]
    command += ["--small"] if args.small else []
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=args.timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise SystemExit(f"{METHODS[method]} failed with exit status {run.returncode}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one method")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--rank-of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        result = measure(args.rank_of, args.warm_up, args.steps, args.small)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        dist.destroy_process_group()
        return
    results = []
    print(f"{'':40}{'step, s':>9}{'peak MiB':>10}{'sent MiB':>10}{'gather MiB':>12}{'reduce MiB':>12}{'last loss':>14}")
    for method in args.methods:
        results.append(launch(method, args))
        r = results[-1]
        moved = "".join(f"{r.get(f'{kind}_mib', float('nan')):12.0f}" for kind in ("all_gather", "reduce_scatter"))
        print(
            f"{r['method']:40}{r['seconds']:9.2f}{r['peak_mib']:10.0f}{r['sent_mib']:10.0f}{moved}{r['losses'][-1]:14.8f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
