"""Flat buffers against what PyTorch offers for the same copies, on the CPU.

    pytest benchmarks/test_flat.py --benchmark-group-by=group --benchmark-columns=min,median,rounds

Each group is one case. The published recipe is what ZeRO-3 implementations do around a list all-gather: concatenate,
split, reshape, copy.
"""

import pytest
import torch

from moe_zero.ops.flat import FlatPlan, TensorList, pack, unpack

HIDDEN, FFN, IMAGE = 768, 3072, 1408


def layer_shapes():
    """A full-size Q-Former layer with cross-attention and three experts: 42 tensors, 24.6 million parameters."""
    attention = [(HIDDEN, HIDDEN), (HIDDEN,)] * 4 + [(HIDDEN,)] * 2
    cross = [(HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, IMAGE), (HIDDEN,), (HIDDEN, IMAGE), (HIDDEN,), (HIDDEN, HIDDEN)]
    cross += [(HIDDEN,)] * 3
    ffn = [(FFN, HIDDEN), (FFN,), (HIDDEN, FFN), (HIDDEN,)]
    return attention + cross + ffn * 4 + [(HIDDEN,)] * 6


def tensors_of(shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def plan_of(shapes, dtype, world_size):
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return FlatPlan(sizes, [dtype] * len(sizes), [True] * len(sizes), world_size)


def views_of(flat, tensors):
    """The pieces of a flat buffer that the rivals copy to or from: world size 1, so each tensor is one piece."""
    pieces = flat[: sum(t.numel() for t in tensors)].split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def copy_loop(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def measure(benchmark, function, group, rounds):
    benchmark.group = group
    benchmark.pedantic(function, rounds=rounds, warmup_rounds=3)


CASES = {
    "layer fp32 to fp32": (layer_shapes(), torch.float32, 30),
    "layer fp32 to bf16": (layer_shapes(), torch.bfloat16, 30),
    "2000 tensors of 768": ([(768,)] * 2000, torch.float32, 100),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rival", ["ours", "ours, a plain list", "cat", "foreach_copy", "copy_loop", "one_copy"])
def test_pack(benchmark, case, rival):
    shapes, dtype, rounds = CASES[case]
    tensors, plan = tensors_of(shapes), plan_of(shapes, dtype, 1)
    flat, held = pack(tensors, plan), TensorList(tensors)
    views = views_of(flat, tensors)
    flattened = [t.view(-1) for t in tensors]
    source = torch.randn(flat.numel())
    exact = flat[: sum(plan.sizes)]
    functions = {
        "ours": lambda: pack(held, plan, flat),
        "ours, a plain list": lambda: pack(tensors, plan, flat),
        "cat": lambda: torch.cat(flattened, out=exact) if dtype == torch.float32 else exact.copy_(torch.cat(flattened)),
        "foreach_copy": lambda: torch._foreach_copy_(views, tensors),
        "copy_loop": lambda: copy_loop(views, tensors),
        "one_copy": lambda: flat.copy_(source),
    }
    measure(benchmark, functions[rival], f"pack, {case}", rounds)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rival", ["ours", "ours, a plain list", "foreach_copy", "copy_loop", "one_copy"])
def test_unpack(benchmark, case, rival):
    shapes, dtype, rounds = CASES[case]
    tensors, plan = tensors_of(shapes), plan_of(shapes, dtype, 1)
    flat, held = pack(tensors, plan), TensorList(tensors)
    views = views_of(flat, tensors)
    target = torch.randn(flat.numel())
    functions = {
        "ours": lambda: unpack(flat, plan, held),
        "ours, a plain list": lambda: unpack(flat, plan, tensors),
        "foreach_copy": lambda: torch._foreach_copy_(tensors, views),
        "copy_loop": lambda: copy_loop(tensors, views),
        "one_copy": lambda: target.copy_(flat),
    }
    measure(benchmark, functions[rival], f"unpack, {case}", rounds)


@pytest.mark.parametrize("rival", ["ours", "published_recipe"])
def test_gather_side(benchmark, rival):
    """All that is copied on this rank when a layer is fetched at world size 4, apart from the collective itself."""
    shapes = layer_shapes()
    tensors, plan = tensors_of(shapes), plan_of(shapes, torch.float32, 4)
    gathered = pack(tensors, plan)
    chunks = list(gathered.clone().chunk(4))  # what a list all-gather leaves behind

    def published_recipe():
        whole = torch.cat(chunks)[: sum(plan.sizes)]
        for tensor, piece in zip(tensors, whole.split(list(plan.sizes)), strict=True):
            tensor.copy_(piece.reshape(tensor.shape))

    functions = {"ours": lambda: unpack(gathered, plan, tensors), "published_recipe": published_recipe}
    measure(benchmark, functions[rival], "gather side, world size 4", 30)


@pytest.mark.parametrize("rival", ["ours", "pack_then_norm_then_check"])
def test_pack_with_sums(benchmark, rival):
    shapes = layer_shapes()
    tensors, plan = tensors_of(shapes), plan_of(shapes, torch.float32, 1)
    flat, stats = pack(tensors, plan), torch.zeros(2)

    def separate():
        pack(tensors, plan, flat)
        return torch._foreach_norm(tensors), torch.isfinite(flat).all()

    functions = {"ours": lambda: pack(tensors, plan, flat, stats=stats), "pack_then_norm_then_check": separate}
    measure(benchmark, functions[rival], "pack, sum of squares, finite check", 30)
