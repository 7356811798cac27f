"""What `torchrun` starts in test_machines.py: trains a small model with checkpoints and resumes where there is one.

    train_script.py OUT [--hosts N] [--die forward|backward|save]

Writes the losses of all steps to OUT/losses.json. With --die, rank 1 kills itself there, once. With --hosts, parameters
are sharded over the ranks of a host and replicated over N hosts.
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moe_zero.zero import find_checkpoint, load_checkpoint, save_checkpoint_async, shard

STEPS, BATCH, WIDTH = 6, 8, 12
DIES_AT = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kill_once(out):
    """Without a word to anybody, as the kernel does it when memory runs out."""
    marker = out / "died"
    if not marker.exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(where, out, sharded):
    block = sharded.module.blocks[1]
    if where == "forward":
        block.register_forward_hook(lambda *_: kill_once(out))
    elif where == "backward":
        block.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda _: kill_once(out)) and None
        )
    else:
        from moe_zero.zero import checkpoint

        before = checkpoint.checksum
        checkpoint.checksum = lambda path: kill_once(out) or before(path)


def train(out, hosts=1, die=None):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = init_device_mesh("cpu", (hosts, world_size // hosts)) if hosts > 1 else None
    torch.manual_seed(rank)  # rank 0's weights count
    sharded = shard(Net(), Block, mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.02)
    done, losses = 0, []
    try:
        extra = load_checkpoint(find_checkpoint(out / "checkpoints"), sharded, optimizer)
        done, losses = extra["step"], extra["losses"]
    except FileNotFoundError:
        pass
    for step in range(done, STEPS):
        if die is not None and rank == 1 and step == DIES_AT:
            arrange_death(die, out, sharded)
        x_BD = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))[rank::world_size]
        loss = sharded(x_BD).square().mean()
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        save_checkpoint_async(
            out / "checkpoints", sharded, optimizer, extra={"step": step + 1, "losses": losses}
        ).wait()
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--die", choices=["forward", "backward", "save"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    losses = train(args.out, args.hosts, args.die)
    if dist.get_rank() == 0:
        (args.out / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
