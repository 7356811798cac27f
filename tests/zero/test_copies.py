"""What a step copies between tensors and collectives: an unpack per fetch, a pack per reduction, and nothing else."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_zero.zero import collectives, shard

COPIES = (
    "copy_",
    "clone",
    "_to_copy",
    "cat",
    "stack",
    "_foreach_copy_",
    "split_with_sizes_copy",
    "contiguous",
    "index",
)


class Operators(TorchDispatchMode):
    """Counts the operators that one thread calls."""

    def __init__(self, counts: Counter):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name] += 1
        return function(*args, **kwargs or {})


def model(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(3)]
    for layer in layers if frozen else []:
        layer[0].requires_grad_(False)
    return nn.Sequential(*layers)


def operators_of_a_step(module: nn.Module, lanes: bool) -> Counter:
    """Operators of the second step, on the computing thread and on those that run collectives."""
    counts, own_submit = Counter(), collectives._ThreadLane.submit

    def counted(lane, collective):
        def inside():
            seen = Counter()
            with Operators(seen):
                result = collective()
            with lock:
                counts.update(seen)
            return result

        return own_submit(lane, inside)

    lock = threading.Lock()
    x = torch.randn(4, 8)
    module(x).sum().backward()
    module.zero_grad()
    collectives._ThreadLane.submit = counted if lanes else own_submit
    try:
        with Operators(counts):
            module(x).sum().backward()
    finally:
        collectives._ThreadLane.submit = own_submit
    return counts


def step_on_a_rank(frozen: bool) -> tuple[dict, Counter]:
    plain = operators_of_a_step(model(frozen), lanes=False)
    sharded = shard(model(frozen), nn.Sequential)
    counts = operators_of_a_step(sharded, lanes=True)
    copies = {name: counts[f"aten::{name}"] - plain[f"aten::{name}"] for name in COPIES}
    return {name: n for name, n in copies.items() if n}, counts


@pytest.mark.distributed
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_packs_and_unpacks_once_per_layer_and_copies_nothing_else(on_ranks, frozen):
    fetches = 5  # three layers for forward, two again for backward, which finds the last one still there
    # Gathered parameters of one kind lie in the flat buffer as they do in the layer, and are used where they are.
    unpacked = fetches if frozen else 0
    for copies, counts in on_ranks(2, step_on_a_rank, frozen):
        assert copies == {}
        assert counts["moe_zero::unpack_"] == unpacked
        assert counts["moe_zero::pack_"] == counts["moe_zero::sum_rows_"] == counts["c10d::alltoall_base_"] == 3
        # A collective is preceded by a gather of one number per rank, which tells whether all mean the same layer.
        assert counts["c10d::_allgather_base_"] == fetches + (fetches + 3)
