"""Memory and communication of a training step before anything is launched.

After ZeRO (arXiv 1910.02054, sections 3 and 7): with Psi parameters, N ranks, 16-bit parameters and gradients and K
bytes of optimizer state for each parameter, plain data parallelism holds (2 + 2 + K) Psi bytes and sends 2 Psi elements
a step; stage 1 shards K, stage 2 the gradients too, at the same traffic; stage 3 everything: (2 + 2 + K) Psi / N bytes
and 3 Psi. What is counted here is finer: padding of shards, layers that stay from forward to backward, buffers, and
what exists at the same time. For ZeRO-3 it is the engine of this package that is followed, layer by layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from moe_zero.zero.building import layer_modules, slots_of_layers
from moe_zero.zero.collectives import CHUNK_BYTES
from moe_zero.zero.flat_layer import Layout

STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
OPTIMIZERS = {"adamw": (2, 2), "adam": (2, 2), "momentum": (1, 0), "sgd": (0, 0), "adagrad": (1, 1), "rmsprop": (1, 1)}
"""Tensors that PyTorch's optimizers keep for each parameter, and temporary ones of the size of the parameter (without
``foreach``, their default on a CPU)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on each rank for one way of data-parallel training.

    ``parameters``, ``gradients``, ``optimizer``: what this rank keeps of them. ``activations``: what autograd saves in
    one forward; an estimate. ``buffers``: layers and communication buffers that come and go, at the moment of ``peak``.
    ``process``: Python and the libraries. ``peak``: the most that exists at once, ``at`` "start" (the whole model
    before it is sharded), "backward" or "optimizer"; less than the sum of all, since gradients come while activations
    go. ``saving``: copies that :func:`~moe_zero.zero.save_checkpoint_async` holds besides while it writes, which are
    not in ``peak``; 0 for strategies other than ZeRO-3. ``all_gather``, ``reduce_scatter``, ``all_reduce``: payload of
    a step. ``sent``: what this rank sends of it (a ring, or an all-to-all).
    """

    strategy: str
    ranks: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    process: int
    peak: int
    at: str
    saving: int
    all_gather: int
    reduce_scatter: int
    all_reduce: int
    sent: int

    def to_dict(self) -> dict:
        return asdict(self)


def estimate(
    model: nn.Module,
    layers: type[nn.Module] | str | Sequence[type[nn.Module] | str],
    ranks: int,
    *,
    optimizer: str = "adamw",
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    activations: Mapping[str, int] | None = None,
    process: int | None = None,
) -> list[Estimate]:
    """What a step takes on each of ``ranks`` ranks, for each of :data:`STRATEGIES`.

    Args:
        model: only shapes and dtypes of its parameters are looked at, so build it under
            ``torch._subclasses.FakeTensorMode`` or on the meta device and it needs no memory.
        layers, compute_dtype, reshard_after_forward: as in :func:`moe_zero.zero.shard`. With a ``compute_dtype`` other
            than the parameters' own, ZeRO-3 keeps masters, gradients and states in the parameters' dtype, as
            :func:`~moe_zero.zero.shard` does; the others keep parameters and gradients in ``compute_dtype``, and
            masters with the optimizer, as in the paper.
        optimizer: one of :data:`OPTIMIZERS` (``"momentum"``: SGD with momentum).
        activations: bytes that autograd saves, by layer, from :func:`activation_bytes`; ``None`` leaves them out.
        process: bytes of Python and its libraries; by default what this process holds now.

    Layers are taken to be called once each, in the order of ``named_modules()``, and every step but the first, which
    does not know the order yet.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be an integer of at least 1")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}")
    modules = {**layer_modules(model, layers), "": model}
    slots = slots_of_layers(model, modules)
    convert = None if compute_dtype is None else lambda name, parameter: compute_dtype
    layouts = {
        name: Layout.of(name, of_layer, ranks, None, convert, None, communicates=ranks > 1)
        for name, of_layer in slots.items()
        if of_layer
    }
    saved = {name: 0 if activations is None else activations[name] for name in modules}
    step = _Step(layouts, saved, ranks, *OPTIMIZERS[optimizer], reshard_after_forward)
    process = resident_bytes() if process is None else process
    return [step.data_parallel(stage, process) for stage in (0, 1, 2)] + [step.sharded(process)]


def activation_bytes(
    model: nn.Module,
    layers: type[nn.Module] | str | Sequence[type[nn.Module] | str],
    run: Callable[[nn.Module], Tensor],
) -> dict[str, int]:
    """Bytes of the storages that autograd saves in a forward, by layer (those outside of all layers under ``""``).

    Args:
        model: in the dtype that it computes in; under ``FakeTensorMode`` nothing is computed and nothing needs memory.
        layers: as in :func:`estimate`. A storage counts for the innermost layer that saved it first.
        run: calls the model on one rank's part of the batch. Parameters and buffers are not counted.
    """
    modules = {**layer_modules(model, layers), "": model}
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = dict.fromkeys(modules, 0)
    running = [""]
    kept = []  # so that no address is used twice

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(tensor)
            saved[running[-1]] += storage.nbytes()
        return tensor

    with ExitStack() as stack:
        for name, module in modules.items():
            if module is not model:
                enter = module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
                leave = module.register_forward_hook(lambda *_: running.pop() and None)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            run(model)
    return saved


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) * 1024


class _Step:
    """Sizes of everything in a step, in bytes."""

    def __init__(
        self,
        layouts: dict[str, Layout],
        saved: dict[str, int],
        ranks: int,
        states: int,
        temporaries: int,
        reshard: bool,
    ):
        self.layouts, self.saved, self.ranks = layouts, saved, ranks
        self.states, self.temporaries, self.reshard = states, temporaries, reshard
        self.names = [name for name in layouts if name]  # in the order of calls
        slots = [slot for layout in layouts.values() for slot in layout.slots]
        # A parameter's bytes as it is initialised, as it is in use, and as a master.
        self.initial = sum(slot.parameter.numel() * slot.parameter.element_size() for slot in slots)
        self.in_use = sum(_full_bytes(layout) for layout in layouts.values())
        self.own_masters = any(layout.dtype != dtype for layout in layouts.values() for dtype in layout.in_use)
        self.rows = sum(layout.gradients.flat_bytes for layout in layouts.values())
        self.activations = sum(saved.values())

    def data_parallel(self, stage: int, process: int) -> Estimate:
        """Plain data parallelism (stage 0) and the first two stages of ZeRO."""
        layouts, ranks = self.layouts.values(), self.ranks
        full_gradients = sum(_gradient_bytes(layout) for layout in layouts)
        masters = sum(layout.masters.trainable_bytes for layout in layouts)  # of one rank
        of_optimizer = masters * (self.states + self.own_masters) * (1 if stage else ranks)
        gradients = full_gradients if stage < 2 else sum(_gradient_bytes(layout) // ranks for layout in layouts)
        largest = max(_gradient_bytes(layout) for layout in layouts)
        # Gradients travel in buckets: DDP keeps one for every gradient, the others need them layer by layer.
        buckets = full_gradients if stage == 0 else 2 * largest
        update = self.temporaries * max(
            slot.parameter.numel() * layout.dtype.itemsize for layout in layouts for slot in layout.slots
        )
        always = process + self.in_use + of_optimizer
        moments = {"start": (0, process + self.initial)}
        arrived = 0
        remaining = self.activations
        for name in [*reversed(self.names), ""]:
            if name not in self.layouts:
                continue
            moments[f"backward {name}"] = (buckets, always + arrived + remaining + buckets)
            arrived += _gradient_bytes(self.layouts[name]) // (1 if stage < 2 else ranks)
            remaining -= self.saved[name]
        kept_buckets = buckets if stage == 0 else 0
        moments["optimizer"] = (kept_buckets + update, always + gradients + kept_buckets + update)
        alone = ranks == 1
        return self._estimate(
            STRATEGIES[stage],
            (self.in_use, gradients, of_optimizer, process),
            moments,
            saving=0,
            all_gather=0 if stage == 0 or alone else full_gradients,  # the parameters that were updated
            reduce_scatter=0 if stage == 0 or alone else full_gradients,
            all_reduce=full_gradients if stage == 0 and not alone else 0,
        )

    def sharded(self, process: int) -> Estimate:
        """Stage 3, as :class:`moe_zero.zero.schedule.Schedule` runs it."""
        layouts, ranks = self.layouts, self.ranks
        masters = sum(layout.masters.shard_bytes for layout in layouts.values())
        gradients = sum(layout.masters.trainable_bytes for layout in layouts.values())
        of_optimizer = self.states * gradients
        full = {name: self._gathered(layout) for name, layout in layouts.items()}
        rows = {name: layout.gradients.flat_bytes for name, layout in layouts.items()}
        always = process + masters + of_optimizer
        moments = {"start": (0, process + self.initial + masters)}

        remaining, arrived, under_way = self.activations, 0, 0
        before, waited = None, False
        resident = full.get("", 0) + (0 if self.reshard else sum(full[name] for name in self.names))
        for i, name in [*reversed(list(enumerate(self.names))), *([(0, "")] if "" in layouts else [])]:
            # The layer at work and the one that backward comes to next; at the end, the last one. A layer that is
            # larger than both this one and the one whose gradients are under way waits until they are through.
            if waited:
                under_way = 0
            following = full[self.names[i - 1]] if i and self.reshard else 0
            waited = before is not None and following > max(full[name], full[before])
            fetched = full[self.names[i]] + (0 if waited else following) if self.reshard else 0
            own = _gradient_bytes(layouts[name])
            # On one rank gradients are packed into the shard's. Otherwise those of the layer before still wait while
            # they are packed, sent and summed, part by part.
            buffers = resident + fetched + own + (under_way if ranks > 1 else rows[name])
            moments[f"backward {name}"] = (buffers, always + arrived + remaining + buffers)
            remaining -= self.saved[name]
            arrived += layouts[name].masters.trainable_bytes
            under_way = own + 2 * min(rows[name], CHUNK_BYTES)
            before = name
            if name and not self.reshard:
                resident -= full[name]
        update = self.temporaries * max(layout.masters.trainable_bytes for layout in layouts.values())
        moments["optimizer"] = (update, always + gradients + update)

        payload = {name: layout.parameters.flat_bytes for name, layout in layouts.items()}
        # The rest of the model and the layer that backward needs first stay from forward to backward.
        again = sum(payload[name] for name in self.names[:-1]) if self.reshard else 0
        return self._estimate(
            STRATEGIES[3],
            (masters, gradients, of_optimizer, process),
            moments,
            saving=masters + of_optimizer,
            all_gather=sum(payload.values()) + again if ranks > 1 else 0,
            reduce_scatter=self.rows if ranks > 1 else 0,
            all_reduce=0,
        )

    def _gathered(self, layout: Layout) -> int:
        """Memory of a layer's full parameters beside its shard, which on one rank may hold them itself."""
        is_shard = self.ranks == 1 and all(dtype == layout.dtype for dtype in layout.in_use)
        return 0 if is_shard else layout.parameters.flat_bytes

    def _estimate(self, strategy, kept, moments, *, saving, all_gather, reduce_scatter, all_reduce) -> Estimate:
        at, (buffers, peak) = max(moments.items(), key=lambda item: item[1][1])
        parameters, gradients, optimizer, process = kept
        payload = all_gather + reduce_scatter + 2 * all_reduce
        return Estimate(
            strategy=strategy,
            ranks=self.ranks,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=self.activations,
            buffers=buffers,
            process=process,
            peak=peak,
            at=at.partition(" ")[0],
            saving=saving,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
            all_reduce=all_reduce,
            sent=payload * (self.ranks - 1) // self.ranks,
        )


def _full_bytes(layout: Layout) -> int:
    return sum(slot.parameter.numel() * dtype.itemsize for slot, dtype in zip(layout.slots, layout.in_use, strict=True))


def _gradient_bytes(layout: Layout) -> int:
    """Full gradients, in the dtypes of the parameters in use."""
    return sum(
        slot.parameter.numel() * dtype.itemsize
        for slot, dtype in zip(layout.slots, layout.in_use, strict=True)
        if slot.parameter.requires_grad
    )
