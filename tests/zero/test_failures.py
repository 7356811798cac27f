"""What goes wrong is an error that names it, on all ranks, before the time-out."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_zero.zero import (
    RanksDisagree,
    Zero3Layer,
    Zero3Sequential,
    checkpoint,
    find_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
    shard,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Block(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Net(nn.Module):
    def __init__(self, blocks=4, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)

    def forward(self, x, skip=None):
        for i, block in enumerate(self.blocks):
            x = x if i == skip else block(x)
        return self.last(x)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def refused(expected, match, make):
    """The same model object can be sharded afterwards: it was refused before it was changed."""
    model = Net()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(expected, match=match):
        make(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    shard(model, Block)


def bad_arguments():
    refused(
        ValueError, r"matches no module; the model has Block, Linear, ModuleList, Net", lambda m: shard(m, nn.Conv2d)
    )
    refused(ValueError, "'encoder.*', which matches", lambda m: shard(m, ["blocks.*", "encoder.*"]))
    refused(TypeError, "layers has 3; use", lambda m: shard(m, [3]))
    refused(TypeError, "layers is 3; use a module class", lambda m: shard(m, 3))
    refused(ValueError, "layers is empty; name", lambda m: shard(m, []))
    refused(ValueError, "is the model itself and none of its modules", lambda m: shard(m, Net))
    refused(TypeError, "process_group is 3; it must be a ProcessGroup", lambda m: shard(m, Block, 3))
    refused(TypeError, "offload is 'cpu'; it must be True or False", lambda m: shard(m, Block, offload="cpu"))
    with pytest.raises(TypeError, match=r"model is 'net'; it must be a torch\.nn\.Module"):
        shard("net", Block)
    refused(ValueError, "prefetch is -1", lambda m: shard(m, Block, prefetch=-1))
    refused(
        ValueError, "reduce_algorithm is 'ring'; it must be one of", lambda m: shard(m, Block, reduce_algorithm="ring")
    )
    refused(ValueError, "dtype is torch.int8", lambda m: shard(m, Block, dtype=torch.int8))
    refused(
        TypeError,
        "group_fn gave 'a' for parameter 'blocks.0.weight'",
        lambda m: shard(m, Block, group_fn=lambda n, p: "a"),
    )
    refused(ValueError, "rank is 7, but", lambda m: Zero3Layer(m.last, 7))
    refused(ValueError, "world_size is 9, but", lambda m: Zero3Layer(m.last, rank(), 9))
    with pytest.raises(ValueError, match=r"modules\[1\] \(Linear\) has parameters"):
        Zero3Sequential([Zero3Layer(nn.Linear(2, 2)), nn.Linear(2, 2)])
    sharded = shard(Net(), Block)
    with pytest.raises(ValueError, match="is sharded already"):
        shard(sharded.module, Block)
    with pytest.raises(ValueError, match="the model is sharded already; shard a model once"):
        shard(sharded, Block)
    with pytest.raises(ValueError, match="module '0' is sharded already"):
        shard(nn.Sequential(sharded, Block(2, 2)), Block)
    with pytest.raises(ValueError, match=r"groups has 0 entries, but group_fn gives parameter 'blocks.0.weight' tag 0"):
        sharded.param_groups([])


@pytest.mark.parametrize("world_size", [0, 2])
def test_bad_arguments_are_refused_before_anything_is_changed(world_size, on_ranks):
    on_ranks(world_size, bad_arguments)


def bad_on_one_rank():
    other = RanksDisagree if rank() == 0 else ValueError
    refused(other, "matches no module", lambda m: shard(m, Block if rank() == 0 else nn.Conv2d))
    refused(RanksDisagree, r"blocks.2.weight: \(\(6, 6\), 'torch.float32', True, 0\) on rank 0, .*False", freeze_on_one)
    refused(RanksDisagree, "prefetch: 0 on rank 0, 1 on rank 1", lambda m: shard(m, Block, prefetch=rank()))
    refused(RanksDisagree, "layer 'blocks.4'", lambda m: shard(Net(4 + rank()), Block))
    refused(RanksDisagree, r"weight: \(\(6, 6\).* on rank 0, \(\(7, 7\)", lambda m: shard(Net(width=6 + rank()), Block))


def freeze_on_one(model):
    model.blocks[2].requires_grad_(rank() == 0)
    try:
        shard(model, Block)
    finally:
        model.requires_grad_(True)


def test_what_differs_between_ranks_is_refused_on_all(on_ranks):
    on_ranks(2, bad_on_one_rank)


def skip_a_layer(steps):
    sharded = shard(Net(), Block)
    with pytest.raises(
        RanksDisagree, match=r"rank 0 layer 'blocks.1', rank 1 layer 'blocks.[02]'. Every rank must run"
    ):
        for step in range(steps):
            skip = 1 if rank() == 1 and step == steps - 1 else None
            sharded(torch.ones(2, 6), skip=skip).sum().backward()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_layer_skipped_on_one_rank_is_named_before_the_time_out(steps, on_ranks):
    start = time.monotonic()
    on_ranks(2, skip_a_layer, steps)
    assert time.monotonic() - start < 55


def end_in(where):
    sharded = shard(Net(), Block)

    def leave(*args):
        if rank() == 1:
            time.sleep(60) if where == "hangs" else os._exit(1)

    sharded(torch.ones(2, 6)).sum().backward()
    block = sharded.module.blocks[2]
    if where == "backward":
        block.register_forward_hook(lambda module, args, output: output.register_hook(leave) and None)
    else:
        block.register_forward_hook(leave)
    start = time.monotonic()
    try:
        sharded(torch.ones(2, 6)).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("where", ["forward", "backward", "hangs"])
def test_a_rank_that_ends_or_hangs_ends_the_others(where, fresh_ranks):
    ranks = fresh_ranks(2, timeout=4)
    ranks.start(end_in, where)
    succeeded, answer = ranks.answer(0, 60)
    assert succeeded, answer
    message, seconds = answer
    assert "rank 0: all_gather of layer 'blocks" in message or "rank 0: reduce_scatter of layer" in message, message
    assert "another rank ended or did not reach" in message
    assert seconds < 20


def end_in_a_save(directory, asynchronous):
    sharded = shard(Net(), Block)
    sharded(torch.ones(2, 6)).sum().backward()
    save_checkpoint(directory, sharded)
    if rank() == 1:
        checkpoint.checksum = lambda path: os._exit(1)
    start = time.monotonic()
    try:
        if asynchronous:
            save_checkpoint_async(directory, sharded).wait()
        else:
            save_checkpoint(directory, sharded)
    except RuntimeError as error:
        return str(error), time.monotonic() - start, find_checkpoint(directory).name
    return "no error", 0.0, ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_ends_in_a_save_ends_the_others(asynchronous, fresh_ranks, tmp_path):
    ranks = fresh_ranks(2, timeout=4)
    ranks.start(end_in_a_save, tmp_path, asynchronous)
    succeeded, answer = ranks.answer(0, 60)
    assert succeeded, answer
    message, seconds, latest = answer
    assert message.startswith("rank 0: save_checkpoint() failed; another rank ended or did not reach it"), message
    assert seconds < 20 and latest == "checkpoint-00000001"


def reading_a_sharded_parameter():
    sharded = shard(Net(), Block)
    weight = sharded.module.blocks[1].weight
    assert weight.shape == (6, 6) and weight.requires_grad and "blocks.1.weight" in repr(weight)
    for use in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: torch.optim.SGD([weight], lr=1.0),
        lambda: nn.init.zeros_(weight),
        lambda: sharded.module.state_dict(),
        lambda: sharded.module.to(torch.float64),
    ):
        with pytest.raises(RuntimeError, match=r"on parameter 'blocks.[01].weight', which is sharded over ranks"):
            use()
    with pytest.raises(RuntimeError, match="device and dtype were fixed"):
        sharded.double()
    with pytest.raises(RuntimeError, match="freeze layers or parameters of the wrapped module"):
        sharded.requires_grad_(False)


def test_a_sharded_parameter_cannot_be_read_in_silence(on_ranks):
    on_ranks(2, reading_a_sharded_parameter)


def overwritten():
    sharded = shard(Net(), Block)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(torch.ones(2, 6)).sum().backward()
    loss = sharded(torch.ones(2, 6)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"have been modified .* since the forward whose backward runs now"):
        loss.backward()
    sharded.zero_grad()
    sharded(torch.ones(2, 6)).sum().backward()


class Overwrites(Block):
    def forward(self, x):
        y = super().forward(x)
        y.add_(1)  # tanh needs its result for backward
        return y


def overwritten_inside():
    sharded = shard(nn.Sequential(Overwrites(6, 6), Overwrites(6, 6)), Overwrites)
    with pytest.raises(
        RuntimeError, match=r"saved for backward while layer .* has been modified by an inplace operation"
    ):
        sharded(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize("world_size", [0, 2])
def test_values_overwritten_between_forward_and_backward_are_an_error(world_size, on_ranks):
    on_ranks(world_size, overwritten)
    on_ranks(2, overwritten_inside)


def freezing():
    sharded = shard(Net(), Block)
    blocks = sharded.module.blocks
    blocks[1].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"\['blocks.1.weight'\] are frozen, but lie in one shard"):
        sharded(torch.ones(2, 6))
    model = Net()
    model.blocks[1].requires_grad_(False)
    sharded = shard(model, Block)
    model.blocks[1].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'blocks.1.bias' was frozen when the layer was sharded"):
        sharded(torch.ones(2, 6))


def test_what_cannot_be_frozen_or_unfrozen_any_more_is_named(on_ranks):
    on_ranks(2, freezing)
