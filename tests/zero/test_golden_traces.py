"""Training of the golden files' models, sharded, against recorded losses and gradient norms of unsharded training."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_zero.qformer import QFormerLayer
from moe_zero.qformer.golden import GoldenCase
from moe_zero.zero import shard

GOLDEN = Path(__file__).parents[1] / "golden"
TRACES = {trace["case"]: trace["trace"] for trace in json.loads((GOLDEN / "train_trace.json").read_text())}


def own_rows(rank, world_size, batch):
    """Unequal parts of the batch; a rank beyond the batch has none of its own and none is dropped."""
    bounds = [batch * r // world_size for r in range(world_size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def freeze_lower_half(model):
    for name, parameter in model.named_parameters():
        trained = "layer.1" in name or "attention.self.key" in name or "LayerNorm" in name
        parameter.requires_grad_(trained)


def inputs_of(case, rows=slice(None)):
    tensors = {key: value[rows] for key, value in case.group("in").items()}
    projection = tensors.pop("loss_projection")
    text_mask = tensors.pop("text_attention_mask", None)
    return tensors | {"attention_mask": text_mask}, projection


def train(model, optimizer, clip, inputs, projection, numel, steps):
    trace = []
    for _ in range(steps):
        optimizer.zero_grad()
        share = dist.get_world_size() if dist.is_initialized() else 1
        loss = (model(**inputs).last_hidden_state * projection).sum() / numel**0.5
        (loss * share).backward()  # gradients are averaged over ranks; the trace's are summed
        total = loss.detach().clone()
        if share > 1:
            dist.all_reduce(total)
        trace.append((total.item(), clip(float("inf")).item()))
        optimizer.step()
    return trace


def sharded_trace(name, subset, tags, steps):
    case = GoldenCase.load(GOLDEN / f"{name}.safetensors")
    model = case.model()
    if subset:
        freeze_lower_half(model)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs, projection = inputs_of(case, own_rows(rank, world_size, case.tensors["in.loss_projection"].shape[0]))
    sharded = shard(model, QFormerLayer, group_fn=(lambda name, p: int(p.ndim < 2)) if tags else None)
    groups = sharded.param_groups([{}, {}]) if tags else sharded.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)
    numel = case.tensors["in.loss_projection"].numel()
    return train(sharded, optimizer, sharded.clip_grad_norm_, inputs, projection, numel, steps)


def assert_same(trace, expected):
    for got, wanted in zip(trace, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TRACES)
def test_golden_trace_is_reproduced(name, world_size, on_ranks):
    for trace in on_ranks(world_size, sharded_trace, name, False, world_size == 3, 8):
        assert_same(trace, [(step["loss"], step["grad_norm"]) for step in TRACES[name]])


@pytest.mark.distributed
@pytest.mark.parametrize("name", TRACES)
def test_golden_trace_with_a_subset_trainable_equals_unsharded_training(name, on_ranks):
    case = GoldenCase.load(GOLDEN / f"{name}.safetensors")
    model = case.model()
    freeze_lower_half(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
    inputs, projection = inputs_of(case)
    clip = lambda max_norm: torch.nn.utils.clip_grad_norm_(trained, max_norm)  # noqa: E731
    expected = train(model, optimizer, clip, inputs, projection, projection.numel(), 4)
    for world_size in (0, 2, 3):
        for trace in on_ranks(world_size, sharded_trace, name, True, world_size == 2, 4):
            assert_same(trace, expected)
