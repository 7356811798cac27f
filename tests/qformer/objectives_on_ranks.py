"""Run by torchrun from test_objectives.py: the losses and gradients of one global batch, split over the ranks.

Writes the means over ranks, which is what data parallelism makes of them, to the file named on the command line.
"""

import os
import sys

import torch
import torch.distributed as dist

from moe_zero.qformer.objectives import QFormerPretraining
from small_qformer import WIDER

PAIRS = 6


def make(**changes) -> QFormerPretraining:
    torch.manual_seed(0)
    return QFormerPretraining(WIDER, embed_dim=12, gate_weight=0.5, **changes)


def batch() -> dict:
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(PAIRS, 7, dtype=torch.long)
    mask[::2, 5:] = 0
    return {
        "image_features": torch.randn(PAIRS, 6, 20, generator=draw),
        "input_ids": torch.randint(1, 50, (PAIRS, 7), generator=draw),
        "attention_mask": mask,
        "image_ids": torch.tensor([0, 1, 2, 0, 3, 1]),  # two pictures twice, on different ranks
        "negative_draws": torch.rand(PAIRS, 2, generator=draw),
    }


def main(file: str) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = PAIRS // world_size
    model = make()
    losses = model(**{name: value[rank * share : (rank + 1) * share] for name, value in batch().items()})
    losses.total.backward()
    results = {f"loss.{name}": value.detach().clone() for name, value in losses._asdict().items()}
    results |= {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    for value in results.values():
        dist.all_reduce(value)
        value /= world_size
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
    os._exit(0)  # gloo's threads may still be busy while the interpreter winds down, which has aborted the process
