"""Checkpoints: resumed on other numbers of ranks, written atomically, damage found and named."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from moe_zero.zero import checkpoint, find_checkpoint, load_checkpoint, save_checkpoint, save_checkpoint_async, shard
from moe_zero.zero.checkpoint import _Generation, boxes_of_run

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=None)
        self.linear = nn.Linear(width, width)
        self.mix = nn.Parameter(torch.randn(3, 5, 7))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x)) * self.mix.mean()


class Net(nn.Module):
    def __init__(self, width=13, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.blocks[0].linear.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(seed=0, optimizer=torch.optim.AdamW, **sizes):
    torch.manual_seed(seed)
    sharded = shard(Net(**sizes), Block, group_fn=lambda name, p: int(p.ndim < 2))
    groups = sharded.param_groups([{"weight_decay": 0.1}, {"weight_decay": 0.0}])
    optimizer = optimizer(groups, lr=0.02)
    return sharded, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(sharded, optimizer, scheduler, steps):
    """Losses of the whole batch, which does not depend on the number of ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        x_BD = torch.randn(6, 13, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = sharded(x_BD[rank::world_size]).square().sum() / 24
        (loss * world_size).backward()
        total = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        scheduler.step()
    return losses


def save_after_five(directory, optimizer):
    parts = make(optimizer=optimizer)
    train(*parts, range(5))
    save_checkpoint(directory, *parts, {"next_step": 5, "seen": torch.arange(3)})
    return train(*parts, range(5, 10))


def resume(directory, optimizer):
    parts = make(seed=1, optimizer=optimizer)
    extra = load_checkpoint(directory, *parts)
    assert extra["seen"].tolist() == [0, 1, 2]
    return train(*parts, range(extra["next_step"], 10))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_resumed_on_any_number_of_ranks_equals_the_uninterrupted_run(optimizer, on_ranks, tmp_path):
    expected = on_ranks(2, save_after_five, tmp_path, optimizer)[0]
    for world_size in (0, 1, 2, 3, 4):
        for losses in on_ranks(world_size, resume, tmp_path, optimizer):
            assert losses == pytest.approx(expected, rel=1e-6)


def test_saved_on_one_process_without_group_and_resumed_on_ranks(on_ranks, tmp_path):
    expected = on_ranks(0, save_after_five, tmp_path, torch.optim.AdamW)[0]
    for losses in on_ranks(3, resume, tmp_path, torch.optim.AdamW):
        assert losses == pytest.approx(expected, rel=1e-6)


def save_while_training(directory):
    parts = make()
    train(*parts, range(5))
    saving = save_checkpoint_async(directory, *parts, {"next_step": 5, "seen": torch.arange(3)})
    losses = train(*parts, range(5, 10))  # changes all that is being written
    assert saving.wait() == find_checkpoint(directory) and saving.done()
    return losses


def test_saved_while_training_went_on(on_ranks, tmp_path):
    expected = on_ranks(2, save_while_training, tmp_path)[0]
    for world_size in (0, 3):
        for losses in on_ranks(world_size, resume, tmp_path, torch.optim.AdamW):
            assert losses == pytest.approx(expected, rel=1e-6)


def held_up(directory):
    """What happens while a checkpoint is held up, and after one that failed."""
    parts = make()
    first = save_checkpoint(directory, *parts, {"n": 1})
    go_on = threading.Event()
    finish = _Generation.finish
    _Generation.finish = lambda *args: go_on.wait(60) and finish(*args)
    try:
        pending = save_checkpoint_async(directory, *parts, {"n": 2})
        train(*parts, range(2))
        assert not pending.done() and find_checkpoint(directory) == first
        go_on.set()
        assert load_checkpoint(directory, *parts)["n"] == 2 and pending.done()  # it waited
    finally:
        _Generation.finish = finish
    if not dist.is_initialized() or dist.get_rank() == 0:
        checkpoint.publish, before = raises_disk_full, checkpoint.publish
    kind = OSError if not dist.is_initialized() or dist.get_rank() == 0 else RuntimeError
    try:
        failing = save_checkpoint_async(directory, *parts, {"n": 3})
        train(*parts, range(2))
        with pytest.raises(kind, match="disk full"):
            save_checkpoint(directory, *parts, {"n": 4})
        assert find_checkpoint(directory).name == "checkpoint-00000002"
        with pytest.raises(kind, match="disk full"):
            failing.wait()
    finally:
        if kind is OSError:
            checkpoint.publish = before
    assert save_checkpoint(directory, *parts, {"n": 5}).name == "checkpoint-00000003"


def raises_disk_full(*args):
    raise OSError("disk full")


def full_while_writing(directory, on_last_rank):
    """The disk of one rank is full while its tensors are written; every rank hears of it."""
    parts = make()
    first = save_checkpoint(directory, *parts, {"n": 1})
    rank, last = (dist.get_rank(), dist.get_world_size() - 1) if dist.is_initialized() else (0, 0)
    writer = checkpoint.dcp.FileSystemWriter
    write = writer.write_data
    if rank == (last if on_last_rank else 0):
        writer.write_data = raises_disk_full
    try:
        with pytest.raises(OSError, match=f"rank {last if on_last_rank else 0}: disk full"):
            save_checkpoint(directory, *parts, {"n": 2})
        pending = save_checkpoint_async(directory, *parts, {"n": 3})
        with pytest.raises(OSError, match="disk full"):
            pending.wait()
        assert find_checkpoint(directory) == first
    finally:
        writer.write_data = write
    with pytest.raises(OSError, match="disk full"):
        load_checkpoint(directory, *parts)  # as the next save or load does
    save_checkpoint(directory, *parts, {"n": 4})
    assert load_checkpoint(directory, *parts)["n"] == 4


@pytest.mark.parametrize(("world_size", "on_last_rank"), [(0, False), (2, False), (2, True)])
def test_a_disk_that_is_full_while_tensors_are_written_is_an_error_on_all_ranks(
    world_size, on_last_rank, on_ranks, tmp_path
):
    on_ranks(world_size, full_while_writing, tmp_path, on_last_rank)


@pytest.mark.parametrize("world_size", [0, 2])
def test_the_next_save_waits_and_raises_what_went_wrong(world_size, on_ranks, tmp_path):
    on_ranks(world_size, held_up, tmp_path)


EXITS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_checkpoint as t
parts = t.make()
if len(sys.argv) > 3:
    t.checkpoint.publish = t.raises_disk_full
else:
    checksum = t.checkpoint.checksum
    t.checkpoint.checksum = lambda path: time.sleep(1) or checksum(path)
t.save_checkpoint_async(sys.argv[2], *parts, {"next_step": 0})
"""


@pytest.mark.slow
def test_the_exit_of_the_process_waits_for_the_checkpoint(on_ranks, tmp_path):
    command = [sys.executable, "-c", EXITS, str(Path(__file__).parent), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    assert on_ranks(0, next_step, tmp_path) == [0]
    failed = subprocess.run([*command, "fail"], stderr=subprocess.PIPE, text=True, timeout=120)
    assert "checkpoint-00000002 was not written: OSError('disk full')" in failed.stderr


def next_step(directory):
    return load_checkpoint(directory, *make(seed=1))["next_step"]


def draws_after_loading(directory):
    parts = make()
    torch.manual_seed(7)
    random.seed(7)
    if dist.is_initialized():
        torch.rand(dist.get_rank())  # different states
    save_checkpoint(directory, *parts)
    expected = torch.rand(2).tolist(), random.random()
    load_checkpoint(directory, *parts)
    assert (torch.rand(2).tolist(), random.random()) == expected
    return expected


def test_random_states_are_restored_on_each_rank(on_ranks, tmp_path):
    first, second = on_ranks(2, draws_after_loading, tmp_path)
    assert first != second


def full_state(directory):
    parts = make()
    train(*parts, range(2))
    save_checkpoint(directory, *parts)
    return parts[0].state_dict_full()


def test_other_tools_read_the_unsharded_state_dict(on_ranks, tmp_path):
    expected = on_ranks(2, full_state, tmp_path)[0]
    dcp_to_torch_save(find_checkpoint(tmp_path), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    model = {name: value for name, value in expected.items() if value.numel()}
    assert state["model"].keys() == model.keys()
    assert all(torch.equal(state["model"][name], value) for name, value in model.items())
    assert state["optimizer"]["exp_avg"]["blocks.1.linear.weight"].shape == (13, 13)
    Net().load_state_dict(state["model"], strict=False)


def errors(directory, kind):
    sharded, optimizer, scheduler = make(blocks=2 if kind == "layers" else 3)
    if kind == "optimizer":
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    if kind == "groups":
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    before = sharded.state_dict_full()
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as caught:
        load_checkpoint(directory, sharded, optimizer, scheduler)
    after = sharded.state_dict_full()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(caught.value)


def test_bad_checkpoints_and_wrong_models_are_errors_that_name_them(on_ranks, tmp_path):
    assert "holds no checkpoint" in on_ranks(2, errors, tmp_path, "none")[0]
    on_ranks(2, save_after_five, tmp_path, torch.optim.AdamW)
    for message in on_ranks(2, errors, tmp_path, "layers"):
        assert "model.blocks.2.linear.weight" in message
    for message in on_ranks(2, errors, tmp_path, "optimizer"):
        assert "no trainable shard" in message
    for message in on_ranks(2, errors, tmp_path, "groups"):
        assert "2 parameter groups, this one has 1" in message
    path = find_checkpoint(tmp_path)
    for name in ("__1_0.distcp", ".metadata", "__0_0.distcp", "manifest.json"):
        content = (path / name).read_bytes()
        damaged = bytearray(content)
        damaged[len(damaged) // 2] ^= 0xFF
        (path / name).write_bytes(damaged)
        for message in on_ranks(2, errors, tmp_path, "damaged"):
            assert str(path / name) in message and "damaged" in message
        (path / name).write_bytes(content[:-1])
        for message in on_ranks(2, errors, tmp_path, "cut"):
            assert str(path / name) in message and "damaged" in message
        (path / name).write_bytes(content)


def refuse(directory):
    sharded, optimizer, scheduler = make()
    with pytest.raises(TypeError, match="objects other than"):
        save_checkpoint(directory, sharded, optimizer, scheduler, {"model": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(directory, sharded, keep=0)


def test_what_could_not_be_read_back_is_not_saved(on_ranks, tmp_path):
    on_ranks(2, refuse, tmp_path)
    assert not list(tmp_path.glob("*/manifest.json"))


def written_memory(directory):
    parts = make()
    train(*parts, range(1))
    usual, given = checkpoint._Saver.resolve_data, []
    checkpoint._Saver.resolve_data = lambda saver, item: given.append(usual(saver, item)) or given[-1]
    try:
        save_checkpoint(directory, *parts)
    finally:
        checkpoint._Saver.resolve_data = usual
    own = [layer.shard for layer in parts[0].flat_layers] + [*parts[0].buffers()]
    own += [value for state in parts[1].state.values() for value in state.values() if torch.is_tensor(value)]
    for tensor in (each for each in given if torch.is_tensor(each)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # or DCP copies it
        assert any(each.data_ptr() <= tensor.data_ptr() < each.data_ptr() + each.nbytes for each in own)
    return len(given)


def test_tensors_are_written_without_copies(on_ranks, tmp_path):
    assert min(on_ranks(2, written_memory, tmp_path)) > 10


def save_three(directory):
    parts = make()
    return [save_checkpoint(directory, *parts, keep=2).name for _ in range(3)]


def test_old_generations_are_removed(on_ranks, tmp_path):
    names = on_ranks(2, save_three, tmp_path)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[1:], "latest"]


def save_for_ever(directory, asynchronous):
    parts = make()
    for step in itertools.count():
        for layer in parts[0].flat_layers:
            layer.shard.data.fill_(step)
        save = save_checkpoint_async if asynchronous else save_checkpoint
        save(directory, *parts, {"step": step})


def loaded_values(directory):
    parts = make(seed=1)
    step = load_checkpoint(directory, *parts)["step"]
    return step, {value.item() for tensor in parts[0].state_dict_full().values() for value in tensor.flatten().unique()}


def assert_whole(step, values):
    # BatchNorm's buffers are 0 and 1.
    assert float(step) in values and values <= {float(step), 0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_killed_at_any_moment_leave_a_checkpoint_that_loads(asynchronous, fresh_ranks, on_ranks, tmp_path):
    generator = random.Random(0)
    for _ in range(2):
        ranks = fresh_ranks(2, timeout=20)
        ranks.start(save_for_ever, tmp_path, asynchronous)
        while not (tmp_path / "latest").exists():
            time.sleep(0.01)
        time.sleep(generator.uniform(0.2, 0.6))
        ranks.stop()
        assert_whole(*on_ranks(0, loaded_values, tmp_path)[0])


def kill_often(directory, times):
    """Copies of this process save in a loop until they are killed; how many generations they wrote."""
    generator = random.Random(0)
    for i in range(times):
        child = os.fork()  # no time to start Python and torch again
        if child == 0:
            try:
                save_for_ever(directory, asynchronous=i % 2 == 1)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not (directory / "latest").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert_whole(*loaded_values(directory))
    return int(find_checkpoint(directory).name.removeprefix("checkpoint-"))


@pytest.mark.slow
def test_killed_fifty_times_there_is_always_a_checkpoint_that_loads(on_ranks, tmp_path):
    assert on_ranks(0, kill_often, tmp_path, 50, seconds=120)[0] > 10


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_cover_a_run_in_order(shape):
    numel = torch.Size(shape).numel()
    numbers = torch.arange(numel).view(shape)
    for start in range(numel):
        for stop in range(start + 1, numel + 1):
            covered = []
            for offsets, sizes in boxes_of_run(shape, start, stop):
                box = numbers
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(dim, offset, size)
                covered += box.flatten().tolist()
            assert covered == list(range(start, stop))
