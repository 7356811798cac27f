"""Run by torchrun from test_language_model.py: steps of ZeRO-3 on one global batch, split over the ranks."""

import os
import sys

import torch
import torch.distributed as dist

from moe_zero.qformer import QFormerLayer
from moe_zero.qformer.objectives import QFormerPretraining
from moe_zero.zero import shard
from small_qformer import WIDER

PAIRS, STEPS = 6, 3


def make(**changes) -> QFormerPretraining:
    torch.manual_seed(0)
    return QFormerPretraining(WIDER, embed_dim=12, **changes)


def batch() -> dict:
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(PAIRS, 7, dtype=torch.long)
    mask[:2, 3:] = 0  # ranks have different numbers of words
    return {
        "image_features": torch.randn(PAIRS, 6, 20, generator=draw),
        "input_ids": torch.randint(1, 50, (PAIRS, 7), generator=draw),
        "attention_mask": mask,
        "image_ids": torch.tensor([0, 1, 2, 0, 3, 1]),
        "negative_draws": torch.rand(PAIRS, 2, generator=draw),
    }


def losses_of_steps(*, sharded: bool) -> torch.Tensor:
    """[STEPS, 4]: total, itc, itm, lm of a few steps of SGD, means over the ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = PAIRS // world_size
    mine = {name: value[rank * share : (rank + 1) * share] for name, value in batch().items()}
    model = make()
    if sharded:
        model = shard(model, QFormerLayer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    rows = []
    for _ in range(STEPS):
        losses = model(**mine)
        losses.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(torch.stack([losses.total.detach(), losses.itc, losses.itm, losses.lm]))
    found = torch.stack(rows)
    if world_size > 1:
        dist.all_reduce(found)
    return found / world_size


def main(file: str) -> None:
    dist.init_process_group("gloo")
    found = losses_of_steps(sharded=True)
    if dist.get_rank() == 0:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
    os._exit(0)  # gloo's threads may still be busy while the interpreter winds down, which has aborted the process
