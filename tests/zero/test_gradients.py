"""Sharded training against unsharded training with rank-averaged gradients, in every way in which a model may be used.

Each case is a model and a function that does one step's forwards and backwards. Weights are updated with SGD, which
(unlike Adam) shows a gradient of wrong scale.
"""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_zero.zero import collectives, shard

pytestmark = pytest.mark.distributed

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an input and an output projection, which belong to no block."""

    def __init__(self, block=Block, blocks=4):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(step, size=4, requires_grad=False):
    """Different on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank_and_world()[0])
    return torch.randn(size, WIDTH, generator=generator).requires_grad_(requires_grad)


def plain(model, step):
    model(batch(step)).square().mean().backward()


def input_with_gradient(model, step):
    x = batch(step, requires_grad=True)
    model(x).square().mean().backward()
    return x.grad


class Unused(Block):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        return self.sometimes(x) if rank_and_world()[0] == 1 else x


class Skipping(nn.Module):
    """The output of a block is dropped, on one rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x if i == 2 and rank_and_world()[0] == 1 else y
        return x


def three_forwards(model, step):
    (
        model(batch(step)).mean() + model(batch(step + 50)).square().mean() + model(batch(step + 90)).sin().mean()
    ).backward()


def two_forwards_backward_in_order(model, step):
    first, second = model(batch(step)).square().mean(), model(batch(step + 50)).sin().mean()
    first.backward()
    second.backward()


def two_forwards_backward_in_reverse(model, step):
    first, second = model(batch(step)).square().mean(), model(batch(step + 50)).sin().mean()
    second.backward()
    first.backward()


def backward_twice(model, step):
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_of_the_input_only(model, step):
    x = batch(step, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    model(gradient).square().mean().backward()
    return gradient


def evaluation_between(model, step):
    loss = model(batch(step)).square().mean()
    with torch.no_grad():
        evaluated = model(batch(step + 50))
    loss.backward()
    return evaluated


def forward_without_backward(model, step):
    model(batch(step + 50))
    model(batch(step)).square().mean().backward()
    model(batch(step + 70))


class Twice(Net):
    def forward(self, x):
        return super().forward(x) if self.last is None else self.last(self._twice(self.first(x)))

    def _twice(self, x):
        for i in (0, 1, 1, 2, 0, 3):
            x = self.blocks[i](x)
        return x


class MiddleLoss(Net):
    def forward(self, x):
        self.middle = self.blocks[1](self.blocks[0](self.first(x)))
        y = self.middle
        for block in self.blocks[2:]:
            y = block(y)
        return self.last(y)


def loss_from_the_middle(model, step):
    model(batch(step))
    getattr(model, "module", model).middle.square().mean().backward()


class StoresLoss(Block):
    def forward(self, x):
        self.stored = self.up(x).square().mean()
        return super().forward(x)


def loss_stored_on_modules(model, step):
    model(batch(step))
    sum(block.stored for block in getattr(model, "module", model).blocks).backward()


def loss_stored_and_returned(model, step):
    loss = model(batch(step)).square().mean()
    (loss + sum(block.stored for block in getattr(model, "module", model).blocks)).backward()


@dataclasses.dataclass
class Box:
    x: torch.Tensor
    note: str


class Pair(NamedTuple):
    box: Box
    more: dict


class Nested(Block):
    def forward(self, pair, *, scale=1.0, flag=None):
        assert flag == "yes"
        x = super().forward(pair.box.x) * scale
        return Pair(Box(x, "note"), {"list": [x.mean(), None, 3], "x": pair.more["x"] + x})


class NestedNet(Net):
    def __init__(self):
        super().__init__(Nested)

    def forward(self, x):
        pair = Pair(Box(self.first(x), ""), {"x": x})
        for block in self.blocks:
            pair = block(pair, scale=0.5, flag="yes")
        return self.last(pair.box.x) + pair.more["x"].mean() + pair.more["list"][0]


class Reentrant(Net):
    reentrant = True

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class NonReentrant(Reentrant):
    reentrant = False


class CheckpointInside(Block):
    def forward(self, x):
        return x + checkpoint(lambda y: self.down(F.gelu(self.up(y))), self.norm(x), use_reentrant=False)


class InPlace(Block):
    def forward(self, x):
        x.mul_(0.9)
        y = super().forward(x)
        return y[:, :]  # a view


class InPlaceNet(Net):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).add_(1.0)
        return self.last(x)


class OddGradients(Block):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(super().forward(x) @ self.weight.T * self.up.bias.sum() + self.norm.weight.sum())


class OddParameters(Block):
    def __init__(self):
        super().__init__()
        memory = torch.randn(100)
        self.up.weight = nn.Parameter(memory[3 : 3 + 2 * WIDTH * 4].view(4, 2 * WIDTH).T)
        self.up.bias = nn.Parameter(memory[70:99:2][:1].expand(2 * WIDTH))
        self.norm.weight = nn.Parameter(memory[1:9])
        self.project = nn.Conv2d(1, 1, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)[:, :4]))) + self.project(x[:, None, None])[:, 0, 0]


class SharedBlock(Net):
    """One block in several places."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0]])


class NoParameters(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Tied(Net):
    """A weight shared inside a block, one across blocks, and one with the rest of the model."""

    def __init__(self):
        super().__init__()
        self.blocks[1].again = self.blocks[1].up
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = self.blocks[1].norm
        self.blocks[2].extra = nn.Linear(WIDTH, WIDTH)
        self.blocks[2].extra.weight = self.first.weight


class SeveralDtypes(Block):
    """A fp32 gate in a bf16 layer."""

    def __init__(self):
        super().__init__()
        self.up.to(torch.bfloat16)
        self.gate = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x).to(torch.bfloat16))).float()
        return x + self.down(hidden) * self.gate(x.double()).sigmoid().float()


class Inner(nn.Module):
    """A layer that has layers."""

    def __init__(self):
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.after(self.inside(self.inside(self.before(x))))


def frozen(*names):
    def make():
        model = Net()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


def exception_in_forward(model, step):
    blocks = getattr(model, "module", model).blocks
    hook = blocks[2].register_forward_pre_hook(raise_error)
    with pytest.raises(ArithmeticError):
        model(batch(step))
    hook.remove()
    plain(model, step)


def exception_in_backward(model, step):
    x = batch(step)
    blocks = getattr(model, "module", model).blocks
    hook = blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(raise_error) and None)
    with pytest.raises(ArithmeticError):
        model(x).square().mean().backward()
    hook.remove()
    model.zero_grad()
    plain(model, step)


def raise_error(*args):
    raise ArithmeticError("planned")


CASES = {
    "plain": (Net, plain, Block),
    "input_with_gradient": (Net, input_with_gradient, Block),
    "unused_and_used_on_some_ranks": (lambda: Net(Unused), plain, Unused),
    "output_dropped_on_one_rank": (Skipping, plain, Block),
    "three_forwards_before_one_backward": (Net, three_forwards, Block),
    "two_forwards_backward_in_order": (Net, two_forwards_backward_in_order, Block),
    "two_forwards_backward_in_reverse": (Net, two_forwards_backward_in_reverse, Block),
    "backward_twice_with_retain_graph": (Net, backward_twice, Block),
    "gradient_of_the_input_only": (Net, gradient_of_the_input_only, Block),
    "evaluation_between_forward_and_backward": (Net, evaluation_between, Block),
    "forward_without_backward": (Net, forward_without_backward, Block),
    "layer_used_twice": (Twice, plain, Block),
    "loss_from_a_middle_layer": (MiddleLoss, loss_from_the_middle, Block),
    "loss_stored_on_modules": (lambda: Net(StoresLoss), loss_stored_on_modules, StoresLoss),
    "loss_stored_and_returned": (lambda: Net(StoresLoss), loss_stored_and_returned, StoresLoss),
    "nested_inputs_and_outputs": (NestedNet, plain, Nested),
    "reentrant_checkpointing": (Reentrant, plain, Block),
    "non_reentrant_checkpointing": (NonReentrant, plain, Block),
    "checkpointing_inside_a_layer": (lambda: Net(CheckpointInside), plain, CheckpointInside),
    "in_place_on_inputs_and_outputs": (lambda: InPlaceNet(InPlace), plain, InPlace),
    "gradients_of_odd_strides": (lambda: Net(OddGradients), plain, OddGradients),
    "parameters_of_odd_strides": (lambda: Net(OddParameters), plain, OddParameters),
    "layers_without_parameters": (lambda: Net(NoParameters), plain, "blocks.*"),
    "tied_parameters": (Tied, plain, Block),
    "one_block_in_several_places": (SharedBlock, plain, Block),
    "several_dtypes_in_a_layer": (lambda: Net(SeveralDtypes), plain, SeveralDtypes),
    "layers_in_layers": (lambda: Net(Inner), plain, [Inner, Block]),
    "frozen_layers": (frozen("blocks.1", "blocks.2.up", "last"), plain, Block),
    "frozen_first_layers": (frozen("first", "blocks.0", "blocks.1"), plain, Block),
    "frozen_all_but_one": (frozen("first", "blocks.0", "blocks.1", "blocks.3", "last"), plain, Block),
    "frozen_blocks_input_with_gradient": (
        frozen("first", "blocks"),
        input_with_gradient,
        Block,
    ),
    "exception_in_forward_then_retry": (Net, exception_in_forward, Block),
    "exception_in_backward_then_retry": (Net, exception_in_backward, Block),
}

OPTIONS = {
    "default": {},
    "keep_after_forward": {"reshard_after_forward": False},
    "no_prefetch": {"prefetch": 0},
    "prefetch_3": {"prefetch": 3},
    "tags": {"group_fn": lambda name, p: p.ndim},
    "reduce_scatter": {"reduce_algorithm": "reduce_scatter"},
}


def full_gradients(sharded):
    """Unsharded, by name; zeros where a leaf has none."""
    gradients = {}
    for layer in sharded.flat_layers:
        flat = torch.zeros_like(layer.shard)
        for leaf in layer.leaves:
            if leaf.parameter.grad is not None:
                flat[leaf.start : leaf.stop] = leaf.parameter.grad
        for slot, gradient in zip(layer.slots, layer.gather_values(flat), strict=True):
            gradients[slot.name] = gradient
    return gradients


def average(model):
    world_size = rank_and_world()[1]
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if world_size > 1:
                gradient = parameter.grad.double().contiguous()
                dist.all_reduce(gradient)
                parameter.grad = (gradient / world_size).to(parameter.dtype)


def assert_close(got, wanted, tolerance, what):
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-3)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_nothing_left(sharded):
    """Between steps no full parameter, no full gradient and no work of the step is left."""
    schedule = sharded._schedule
    assert schedule._backward is None and not schedule._running and schedule._pass_uses is None
    for layer in sharded.flat_layers:
        assert layer.never_freed or layer._storage.size() == 0 or layer in schedule._kept, layer.name
        assert all(slot.parameter.grad is None for slot in layer.slots), layer.name
        for chunk in layer.chunk:
            assert chunk.numel() % 16 == 0
        used = torch.zeros_like(layer.shard, dtype=torch.bool)
        for _, start, stop, _ in layer.pieces(layer.comm.rank):
            used[start:stop] = True
        assert not layer.shard[~used].any(), f"padding of {layer.name} is not zero"


def check(case, option, steps=3, tolerance=1e-5):
    make, step_function, layers = CASES[case]
    torch.manual_seed(3 + rank_and_world()[0])  # rank 0's initial values are to win
    model = make()
    reference = copy.deepcopy(model)
    sharded = shard(model, layers, **OPTIONS[option])
    reference.load_state_dict(sharded.state_dict_full())
    reference = reference.requires_grad_(True)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(dict(model.named_parameters())[name].requires_grad)
    leaves = sharded.get_trainable_chunk()
    optimizers = [torch.optim.SGD(leaves, lr=0.05), torch.optim.SGD(reference.parameters(), lr=0.05)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        results = step_function(sharded, step), step_function(reference, step)
        if results[0] is not None:
            assert_close(*results, tolerance, "result")
        average(reference)
        gradients = full_gradients(sharded)
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                precision = 2e-2 if parameter.dtype == torch.bfloat16 else tolerance
                assert_close(gradients[name], parameter.grad, precision, f"step {step}, gradient of {name}")
            else:
                assert not gradients[name].any()
        assert_nothing_left(sharded)
        for layer in sharded.flat_layers:
            present = [leaf.parameter.grad for leaf in layer.leaves if leaf.parameter.grad is not None]
            squares = sum(
                (gradient.double().square().sum() for gradient in present), torch.zeros((), dtype=torch.double)
            )
            torch.testing.assert_close(layer.sum_of_squares(), squares)
        for optimizer in optimizers:
            optimizer.step()
        if any(parameter.dtype == torch.bfloat16 for parameter in reference.parameters()):
            reference.load_state_dict(sharded.state_dict_full())  # the shards are fp32 there
    state = sharded.state_dict_full()
    for name, value in reference.state_dict().items():
        assert_close(state[name], value, tolerance if value.dtype != torch.bfloat16 else 2e-2, name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_rank_average_of_unsharded_training(case, on_ranks):
    on_ranks(2, check, case, "default")


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_unsharded_training_on_one_process(case, on_ranks):
    on_ranks(0, check, case, "default")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "default"])
def test_options_do_not_change_gradients(option, on_ranks):
    for case in (
        "plain",
        "three_forwards_before_one_backward",
        "layer_used_twice",
        "frozen_layers",
        "layers_in_layers",
    ):
        on_ranks(2, check, case, option)


@pytest.mark.parametrize(
    "case", ["plain", "unused_and_used_on_some_ranks", "frozen_layers", "parameters_of_odd_strides"]
)
def test_three_ranks(case, on_ranks):
    on_ranks(3, check, case, "default")


def check_in_parts(case, chunk_bytes):
    usual, collectives.CHUNK_BYTES = collectives.CHUNK_BYTES, chunk_bytes
    try:
        check(case, "default")
    finally:
        collectives.CHUNK_BYTES = usual


@pytest.mark.parametrize("ranks, chunk_bytes", [(2, 1), (2, 1000), (3, 600)])
def test_reductions_in_several_parts(ranks, chunk_bytes, on_ranks):
    for case in (
        "three_forwards_before_one_backward",
        "gradients_of_odd_strides",
        "several_dtypes_in_a_layer",
        "frozen_layers",
    ):
        on_ranks(ranks, check_in_parts, case, chunk_bytes)


def test_twenty_steps_equal_the_reference(on_ranks):
    on_ranks(2, check, "plain", "default", 20, 1e-6)
