"""What `moe_zero.zero.plan` counts is what the engine does; what it estimates is what autograd saves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

from moe_zero.zero import shard
from moe_zero.zero.plan import activation_bytes, estimate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 30), nn.Linear(30, 10)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.blocks[1].up.requires_grad_(False)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measured(compute_dtype, reshard):
    sharded = shard(Net(), Block, compute_dtype=compute_dtype, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(sharded.get_trainable_chunk())
    for _ in range(2):
        optimizer.zero_grad()
        sharded.statistics.reset()
        sharded(torch.ones(2, 10)).float().sum().backward()
        optimizer.step()
    total = sharded.statistics.total
    leaves = sharded.get_trainable_chunk()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "parameters": sum(layer.shard.nbytes for layer in sharded.flat_layers),
        "gradients": sum(leaf.grad.nbytes for leaf in leaves),
        "optimizer": sum(value.nbytes for value in states),
        "all_gather": total["all_gather"].bytes if "all_gather" in total else 0,
        "reduce_scatter": total["reduce_scatter"].bytes if "reduce_scatter" in total else 0,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_counted_is_what_the_engine_keeps_and_moves(ranks, compute_dtype, reshard, on_ranks):
    planned = estimate(Net(), Block, ranks, compute_dtype=compute_dtype, reshard_after_forward=reshard)[-1]
    for found in on_ranks(ranks, measured, compute_dtype, reshard):
        assert found == {name: getattr(planned, name) for name in found}
    assert planned.sent == (planned.all_gather + planned.reduce_scatter) * (ranks - 1) // ranks


def ddp_measured():
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    wrapped(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert dist.get_world_size() == 2
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(value.nbytes for value in states),
    }


@pytest.mark.distributed
def test_plain_data_parallelism_keeps_what_is_planned(on_ranks):
    planned = estimate(Net(), Block, 2)[0]
    padding = 4 * 16 * 2 * 5  # of shards; the optimizer's share is counted by them
    for found in on_ranks(2, ddp_measured):
        assert found["parameters"] == planned.parameters and found["gradients"] == planned.gradients
        assert found["optimizer"] <= planned.optimizer <= found["optimizer"] + 2 * padding


def test_stages_shard_one_thing_after_the_other():
    ddp, first, second, third = estimate(Net(), Block, 4, process=0)
    assert (first.parameters, first.gradients) == (ddp.parameters, ddp.gradients)
    assert 4 * first.optimizer == ddp.optimizer and second.gradients == ddp.gradients // 4
    assert ddp.parameters / 4 <= third.parameters <= ddp.parameters / 4 + 5 * 2 * 64
    assert ddp.peak > first.peak > second.peak
    assert ddp.sent == pytest.approx(1.5 * ddp.all_reduce) and first.sent == pytest.approx(ddp.sent)
    assert third.sent > ddp.sent


def test_activations_are_what_autograd_saves():
    def run(model):
        return model(torch.ones(6, 10))

    with FakeTensorMode():
        saved = activation_bytes(Net(), Block, run)
    # The input of each product, and relu's output, which is the second product's input; frozen weights need no input.
    row = 4 * 6
    assert saved == {
        "blocks.0": 40 * row,
        "blocks.1": 30 * row,
        "blocks.2": 40 * row,
        "blocks.3": 40 * row,
        "": 10 * row,
    }
    with FakeTensorMode():
        planned = estimate(Net(), Block, 2, activations=saved, process=0)
    without = estimate(Net(), Block, 2, process=0)
    assert all(each.activations == sum(saved.values()) for each in planned)
    assert planned[-1].peak >= without[-1].peak


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="ranks is 0; it must be an integer of at least 1"):
        estimate(Net(), Block, 0)
    with pytest.raises(ValueError, match="optimizer is 'lion'; it must be one of adamw, "):
        estimate(Net(), Block, 2, optimizer="lion")
    with pytest.raises(ValueError, match="matches no module"):
        estimate(Net(), nn.Conv2d, 2)
