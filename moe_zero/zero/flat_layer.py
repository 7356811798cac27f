"""One layer's parameters: this rank's flat shard of them, and their full values while the layer is at work.

The full parameters are `nn.Parameter`s that keep their identity; only their storage comes and goes. So what autograd
saved in forward is valid in backward as soon as the layer was fetched again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_zero.ops.flat import FlatPlan, pack, sum_rows, unpack
from moe_zero.zero.collectives import Communicator, Pending
from moe_zero.zero.placeholder import ShardedParameter

if TYPE_CHECKING:
    from moe_zero.zero.schedule import Schedule

TRAINING_PARAMS_IDX = 0
FROZEN_PARAMS_IDX = 1

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DIRECT_ALIGNMENT = 16  # bytes: what vector loads of kernels want of a parameter's address
_OWN_ALIGNMENT = 64


@dataclass
class Slot:
    """A parameter and where it is used: several places if it is tied."""

    names: list[str]
    sites: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    tag: int = 0
    placeholder: ShardedParameter | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Leaf:
    """A run of the trainable shard with one tag: what an optimizer is given."""

    parameter: nn.Parameter
    tag: int
    start: int
    stop: int
    frozen: bool = False  # by its user, after sharding


@dataclass
class Layout:
    """How a layer's parameters lie in flat buffers: ``parameters`` as they are gathered, ``masters`` as they are
    sharded, ``gradients`` (of the trainable ones) as they are reduced."""

    slots: list[Slot]
    in_use: list[torch.dtype]  # of the full parameter of each slot
    dtype: torch.dtype  # of the shards
    parameters: FlatPlan
    masters: FlatPlan
    gradients: FlatPlan

    @staticmethod
    def of(
        name: str,
        slots: Sequence[Slot],
        world_size: int,
        dtype: torch.dtype | None,
        compute_dtype: Callable[[str, nn.Parameter], torch.dtype | None] | None,
        reduce_dtype: torch.dtype | None,
        communicates: bool,
    ) -> Layout:
        """See :class:`FlatLayer` for the arguments. ``ValueError`` for parameters that cannot be sharded."""
        for slot in slots:
            parameter = slot.parameter
            if parameter.layout != torch.strided or parameter.dtype not in _DTYPES:
                raise ValueError(
                    f"layer {name!r}: parameter {slot.name!r} is {parameter.dtype}, {parameter.layout}; only dense "
                    "parameters of float32, float64, bfloat16 or float16 can be sharded; register others as buffers"
                )
        # Sorted by tag, equal hyperparameters lie side by side in a shard without groups of their own, whose parts
        # would not be contiguous after an all-gather.
        slots = sorted(slots, key=lambda slot: slot.tag)
        parameters = [slot.parameter for slot in slots]
        in_use = [
            (compute_dtype and compute_dtype(slot.name, slot.parameter)) or slot.parameter.dtype for slot in slots
        ]
        if dtype is None:
            dtype = parameters[0].dtype if parameters else torch.float32
            for parameter in parameters:
                dtype = torch.promote_types(dtype, parameter.dtype)
        plan = FlatPlan([p.numel() for p in parameters], in_use, [p.requires_grad for p in parameters], world_size)
        used_by_trainable = {d for d, p in zip(in_use, parameters, strict=True) if p.requires_grad}
        if not communicates:
            reduce_dtype = dtype
        elif reduce_dtype is None:
            reduce_dtype = used_by_trainable.pop() if len(used_by_trainable) == 1 else dtype
        return Layout(slots, in_use, dtype, plan, plan.cast(dtype), plan.cast(reduce_dtype, trainable_only=True))


@dataclass
class PartOfRows:
    """Elements ``start`` to ``stop`` of every row of a flat buffer, as a flat buffer of their own, made of ``pieces``:
    (tensor, or ``None`` for padding; first and end of its elements). ``begun`` and ``finished``: the tensors that have
    their first and last pieces in it, if parts come in order."""

    plan: FlatPlan
    pieces: list[tuple[int | None, int, int]]
    begun: list[int]
    finished: list[int]

    @staticmethod
    def of(plan: FlatPlan, start: int, stop: int) -> PartOfRows:
        """``plan`` has one dtype; ``start`` and ``stop - start`` are multiples of 16."""
        size = plan.single_dtype.itemsize
        pieces: list[tuple[int | None, int, int]] = []
        filled = 0
        first, last = {}, {}
        for piece in plan.pieces:
            in_row = piece.byte_offset // size
            first[piece.tensor] = min(in_row, first.get(piece.tensor, in_row))
            last[piece.tensor] = max(in_row + piece.count, last.get(piece.tensor, 0))
            begin, end = max(in_row, start), min(in_row + piece.count, stop)
            if begin < end:
                at = piece.rank * (stop - start) + begin - start
                pieces += [(None, 0, at - filled)] if at > filled else []
                pieces.append((piece.tensor, piece.tensor_start + begin - in_row, piece.tensor_start + end - in_row))
                filled = at + end - begin
        whole = plan.world_size * (stop - start)
        pieces += [(None, 0, whole - filled)] if whole > filled else []
        sizes = [end - begin for _, begin, end in pieces]
        own = FlatPlan(sizes, [plan.single_dtype] * len(sizes), [True] * len(sizes), plan.world_size)
        begun = [i for i, at in first.items() if start <= at < stop]
        return PartOfRows(own, pieces, begun, [i for i, at in last.items() if start < at <= stop])


class FlatLayer:
    """The parameters of one layer, sharded.

    Args:
        name: of the layer, for errors and statistics.
        slots: its parameters.
        comm: over whom.
        dtype: of the shards (and so of gradients and optimizer states); default: that of the parameters, the widest of
            them where they differ.
        compute_dtype: of the full parameters, for each slot; ``None`` leaves a parameter's own dtype.
        reduce_dtype: in which gradients travel; default: that of the parameters in use if there is one, else ``dtype``.
        reshard_after_forward: free the full parameters between forward and backward.
        offload: keep the shard, its gradient and so the optimizer's state in host memory, pinned for CUDA.

    ``chunk``: two flat shards, [0] trainable, [1] frozen, that follow each other in one allocation, so that without a
    change of dtype an all-gather reads both directly. ``leaves``: ``chunk[0]`` itself, or slices of it where tags
    differ.
    """

    def __init__(
        self,
        name: str,
        slots: list[Slot],
        comm: Communicator,
        *,
        dtype: torch.dtype | None = None,
        compute_dtype: Callable[[str, nn.Parameter], torch.dtype | None] | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        offload: bool = False,
    ):
        self.name = name
        self.comm = comm
        self.offload = offload
        self.reshard_after_forward = reshard_after_forward
        layout = Layout.of(
            name, slots, comm.world_size, dtype, compute_dtype, reduce_dtype, communicates=not comm.alone
        )
        self.slots, self.dtype = layout.slots, layout.dtype
        self.plan, self.master_plan, self.gradient_plan = layout.parameters, layout.masters, layout.gradients
        self._trainable = [slot for slot in self.slots if slot.parameter.requires_grad]

        self._pinned = offload and comm.device.type == "cuda"
        self.shard = self._home(self.master_plan.shard_bytes // self.dtype.itemsize, self.dtype).zero_()
        num_trainable = self.plan.shard_numel(True)
        self.chunk = [
            nn.Parameter(self.shard[:num_trainable]),
            nn.Parameter(self.shard[num_trainable:], requires_grad=False),
        ]
        self.leaves = self._make_leaves()
        self._row_is_shard = all(group.dtype == self.dtype for group in self.plan.groups)
        self._lay_out(layout.in_use)
        self._index = -1
        self._state = "free"
        self._rows: Tensor | None = None
        self._pending: Pending | None = None
        self._version_in_use = -1
        self._shown = True
        self._host_row: Tensor | None = None  # the shard in the dtypes in use, and of which version it is
        self._host_row_version = -1
        self._with_gradient: set[int] = set()
        self.holds_gradients = False
        self._arriving: list[Tensor] = []  # gradients on their way to host memory
        self._parts: dict[tuple[int, int], PartOfRows] = {}  # of the gradients' rows, as they are reduced
        self._stats: list[Tensor | None] = []  # of the reductions under way; see `pack`
        self._squares: tuple[Tensor, list[tuple[weakref.ref, int]]] | None = None
        self.schedule: Schedule | None = None

    # -- layout ------------------------------------------------------------------------------------------------------

    def _home(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory where the shards live."""
        device = torch.device("cpu") if self.offload else self.comm.device
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=self._pinned)

    def _make_leaves(self) -> list[Leaf]:
        tags = {slot.tag for slot in self._trainable}
        if len(tags) <= 1:
            chunk = self.chunk[TRAINING_PARAMS_IDX]
            return [Leaf(chunk, tag, 0, chunk.numel()) for tag in tags]
        leaves: list[Leaf] = []
        for slot, start, stop, _ in self.pieces(self.comm.rank):
            if not slot.parameter.requires_grad:
                continue
            if leaves and leaves[-1].tag == slot.tag and leaves[-1].stop == start:
                leaves[-1].stop = stop
            else:
                leaves.append(Leaf(self.chunk[TRAINING_PARAMS_IDX], slot.tag, start, stop))
        for leaf in leaves:
            leaf.parameter = nn.Parameter(self.shard[leaf.start : leaf.stop])
        return leaves

    def pieces(self, rank: int) -> list[tuple[Slot, int, int, int]]:
        """What a rank's shard holds: (slot, start in the shard, stop in the shard, start in the parameter), in
        elements."""
        size = self.dtype.itemsize
        return [
            (self.slots[p.tensor], p.byte_offset // size, p.byte_offset // size + p.count, p.tensor_start)
            for p in self.master_plan.pieces
            if p.rank == rank
        ]

    def _lay_out(self, in_use: Sequence[torch.dtype]) -> None:
        """Where the full parameters lie in their storage. If the flat buffer holds each of them in one run, they are
        views of it and nothing is copied after an all-gather; on one rank, without a change of dtype, views of the
        shard itself.
        """
        starts: list[int] = [0] * len(self.slots)
        for piece in reversed(self.plan.pieces):
            starts[piece.tensor] = piece.rank * self.plan.shard_bytes + piece.byte_offset
        self._direct = (
            (len(self.plan.groups) <= 1 or self.comm.world_size == 1)
            and all(start % _DIRECT_ALIGNMENT == 0 for start in starts)
            and all(slot.parameter.is_contiguous() for slot in self.slots)
        )
        self._aliased = self._direct and self.comm.world_size == 1 and self._row_is_shard and not self.offload
        self._full_bytes = self.plan.flat_bytes
        if not self._direct:
            self._full_bytes = 0
            for i, slot in enumerate(self.slots):
                starts[i] = self._full_bytes
                num_bytes = slot.parameter.numel() * in_use[i].itemsize
                self._full_bytes += -(-num_bytes // _OWN_ALIGNMENT) * _OWN_ALIGNMENT
        if self._aliased:
            self._storage = self.shard.untyped_storage()
        else:
            self._storage = torch.UntypedStorage(self._full_bytes, device=self.comm.device)
        # Views to write through: they have version counters of their own, so that a fetch does not look to autograd as
        # if saved parameters had been changed.
        self._views = []
        for slot, start, dtype in zip(self.slots, starts, in_use, strict=True):
            shaped = torch.empty_like(slot.parameter, device="meta", memory_format=torch.preserve_format)
            view = torch.empty(0, dtype=dtype, device=self.comm.device)
            view.set_(self._storage, start // dtype.itemsize, shaped.shape, shaped.stride())
            self._views.append(view)

    def fingerprint(self) -> dict:
        """What must be equal on all ranks."""
        parameters = {
            name: (tuple(slot.parameter.shape), str(slot.parameter.dtype), slot.parameter.requires_grad, slot.tag)
            for slot in self.slots
            for name in slot.names
        }
        return {
            **parameters,
            "shard dtype": str(self.dtype),
            "dtypes in use": [str(group.dtype) for group in self.plan.groups],
            "reduction dtype": str(self.gradient_plan.single_dtype),
        }

    def join(self, comm: Communicator, name: str) -> None:
        """Becomes a layer of a larger module, under ``name`` and with its communicator (over the same ranks)."""
        self.name = name
        self.comm = comm
        self._index = comm.register(name)
        for slot in self.slots:
            slot.names = [f"{name}.{old}" for old in slot.names]
            slot.placeholder._name = slot.name

    # -- values ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_over(self) -> None:
        """Scatters rank 0's values and puts placeholders into the modules. Collective."""
        self._index = self.comm.register(self.name)
        self.scatter([slot.parameter for slot in self.slots])
        for i, (slot, view) in enumerate(zip(self.slots, self._views, strict=True)):
            slot.placeholder = ShardedParameter.of(slot.parameter, slot.name)
            if slot.parameter.device == view.device:
                slot.parameter.grad = None
                slot.parameter.data = view
            else:
                slot.parameter = nn.Parameter(view, requires_grad=slot.parameter.requires_grad)
            if slot.parameter.requires_grad:
                slot.parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._gradient_arrived(i))
        self.hide()
        if not self._aliased:
            self._storage.resize_(0)

    @torch.no_grad()
    def scatter(self, values: Sequence[Tensor] | None) -> None:
        """Sets all shards from the ``values`` (one per slot) that rank 0 has. Collective; the layer must be free."""
        if self.shard.numel() == 0:
            return
        rows = None
        if self.comm.rank == 0:
            values = [value.detach().to(self.comm.device) for value in values]
            rows = pack(values, self.master_plan).view(torch.uint8).view(self.dtype).view(self.comm.world_size, -1)
        self.comm.synchronize_gathers()
        row = torch.empty_like(self.shard, device=self.comm.device) if self.offload else self.shard
        self.comm.scatter_rows(row, rows)
        if self.offload:
            self.shard.copy_(row)

    @torch.no_grad()
    def gather_values(self, shard: Tensor | None = None) -> list[Tensor]:
        """The full values of all slots in the shards' dtype, as new tensors; of another ``shard`` of the same layout if
        given. Collective."""
        if not self.slots:
            return []
        shard = self.shard if shard is None else shard
        values = [torch.empty(slot.placeholder.shape, dtype=self.dtype, device=self.comm.device) for slot in self.slots]
        rows = shard.to(self.comm.device)
        if self.comm.world_size > 1:
            rows = shard.new_empty(self.comm.world_size * shard.numel(), device=self.comm.device)
            self.comm.gather(rows, shard, self._index).wait()
        unpack(rows, self.master_plan, values)
        return values

    @property
    def version(self) -> int:
        """Changes whenever a shard is written in place, as optimizers do."""
        leaves = sum(leaf.parameter._version for leaf in self.leaves)
        return leaves + sum(chunk._version for chunk in self.chunk)

    # -- full parameters ---------------------------------------------------------------------------------------------

    @property
    def never_freed(self) -> bool:
        """The full parameters are the shard itself."""
        return self._aliased

    @property
    def resident(self) -> bool:
        """Whether the full parameters exist or are on their way."""
        return self._state != "free"

    @property
    def stale(self) -> bool:
        """Whether the full parameters are older than the shards."""
        return self.resident and self._version_in_use != self.version

    @torch.no_grad()
    def start_fetch(self) -> None:
        """Starts the all-gather, unless the parameters are there or on their way."""
        if self._state != "free" or not self.slots:
            return
        self._state = "fetching"
        self._version_in_use = self.version
        if self.comm.world_size == 1 and not self.offload:
            return
        if self._direct:
            self._storage.resize_(self._full_bytes)
            rows = torch.empty(0, dtype=torch.uint8, device=self.comm.device).set_(self._storage)
        else:
            rows = torch.empty(self.plan.flat_bytes, dtype=torch.uint8, device=self.comm.device)
        self._rows = rows
        self._pending = self.comm.gather(rows, self._row(), self._index)

    def _row(self) -> Tensor:
        """This rank's part of the all-gather, uint8."""
        if self._row_is_shard:
            return self.shard.view(torch.uint8)
        if self.offload and self._host_row_version == self.version:
            return self._host_row
        row = self._home(self.plan.shard_bytes, torch.uint8) if self._host_row is None else self._host_row
        for group in self.plan.groups:
            stored = row[group.byte_offset : group.byte_offset + group.shard_numel * group.dtype.itemsize]
            stored.view(group.dtype).copy_(self.shard[group.element_offset : group.element_offset + group.shard_numel])
        if self.offload:
            self._host_row, self._host_row_version = row, self.version
        return row

    @torch.no_grad()
    def finish_fetch(self) -> None:
        """Waits until the full parameters are there."""
        self.start_fetch()
        if self._state != "fetching":
            return
        if self._pending is not None:
            self._pending.wait()
        if not self._direct or (self._rows is None and not self._aliased):
            self._storage.resize_(self._full_bytes)
            unpack(self._row() if self._rows is None else self._rows, self.plan, self._views)
        self._rows = self._pending = None
        self._state = "ready"

    def free(self) -> None:
        """Gives back the memory of the full parameters and puts placeholders into the modules."""
        self.hide()
        if self._pending is not None:
            with suppress(RuntimeError):  # the next collective raises it again
                self._pending.wait()
        self._rows = self._pending = None
        if self._state != "free" and not self._aliased:
            self._storage.resize_(0)
        self._state = "free"

    def show(self) -> None:
        """Puts the full parameters into the modules, for the computation."""
        if not self._shown:
            self._shown = True
            for slot in self.slots:
                for module, attribute in slot.sites:
                    module._parameters[attribute] = slot.parameter

    def hide(self) -> None:
        """Puts placeholders into the modules."""
        if self._shown:
            self._shown = False
            for slot in self.slots:
                for module, attribute in slot.sites:
                    module._parameters[attribute] = slot.placeholder

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the storage of the full parameters."""
        address = tensor.data_ptr()
        start = self._storage.data_ptr()
        return start <= address < start + self._full_bytes and address != 0

    # -- gradients ---------------------------------------------------------------------------------------------------

    def follow_requires_grad(self) -> None:
        """Takes over what was frozen or unfrozen in the modules since. Optimizers skip what has no gradient, so
        parameters can be frozen together that share a leaf, and only those that were trainable when the layer was
        sharded."""
        changed = [slot for slot in self.slots if slot.placeholder.requires_grad != slot.parameter.requires_grad]
        if not changed:
            return
        for slot in changed:
            if slot not in self._trainable:
                raise RuntimeError(
                    f"layer {self.name!r}: parameter {slot.name!r} was frozen when the layer was sharded, so it has no "
                    "gradient memory and no optimizer state; shard it trainable, and freeze it then"
                )
        for tag in {slot.tag: None for slot in changed}:
            members = [slot for slot in self._trainable if slot.tag == tag]
            if len({slot.placeholder.requires_grad for slot in members}) > 1:
                frozen = [slot.name for slot in members if not slot.placeholder.requires_grad]
                raise RuntimeError(
                    f"layer {self.name!r}: {frozen} are frozen, but lie in one shard with parameters that are not, "
                    "and the optimizer knows only the shard; give them a tag of their own with group_fn, or freeze "
                    "them before sharding"
                )
        for slot in changed:
            slot.parameter.requires_grad_(slot.placeholder.requires_grad)
        for leaf in self.leaves:
            leaf.frozen = not any(slot.parameter.requires_grad for slot in self._trainable if slot.tag == leaf.tag)

    @property
    def trains(self) -> bool:
        """Whether some parameter gets a gradient. (The same on all ranks; a rank may own no leaf.)"""
        return any(slot.parameter.requires_grad for slot in self._trainable)

    def _gradient_arrived(self, slot: int) -> None:
        self._with_gradient.add(slot)
        self.schedule.gradient_arrived(self)

    @property
    def all_gradients_arrived(self) -> bool:
        return len(self._with_gradient) == sum(slot.parameter.requires_grad for slot in self._trainable)

    @property
    def some_gradients_arrived(self) -> bool:
        return bool(self._with_gradient)

    def hold_gradients(self) -> None:
        """Keeps the full gradients of this backward, to be reduced together with those of a later one."""
        self.holds_gradients = True
        self._with_gradient.clear()

    def discard_gradients(self) -> None:
        self.holds_gradients = False
        self._with_gradient.clear()
        for slot in self._trainable:
            slot.parameter.grad = None

    @torch.no_grad()
    def start_reduction(self) -> Pending | Tensor:
        """Starts the reduce-scatter of the full gradients, which are given up. Its result, or the tensor returned if
        there is nobody to communicate with, is this rank's part of their mean over ranks; parameters without a gradient
        contribute zeros."""
        gradients = [slot.parameter.grad for slot in self._trainable]
        gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        self.discard_gradients()
        dtype, numel, comm = self.gradient_plan.single_dtype, self.plan.shard_numel(True), self.comm
        stats = torch.empty(2, dtype=torch.float64, device=comm.device)
        self._stats.append(stats if comm.alone or comm.squares_of_sums(dtype, self.dtype) else None)
        fill = self._packing(gradients, stats if comm.alone else None)
        if comm.alone and not self.offload:
            rows = torch.empty(numel, dtype=dtype, device=comm.device)
            fill(rows, 0, numel)
            return rows
        host = self._home(numel, self.dtype) if self.offload else None
        stats = None if comm.alone else stats
        return comm.reduce(fill, numel, dtype, self.dtype, self._index, stats=stats, host=host)

    def _packing(self, gradients: list[Tensor | None], stats: Tensor | None) -> Callable[[Tensor, int, int], None]:
        """What :meth:`Communicator.reduce` asks for: packs the same part of every row, in order from the first to the
        last, and gives up each of the ``gradients`` with its last part."""
        scale = 1.0 / self.comm.world_size
        numel = self.plan.shard_numel(True)

        def fill(rows: Tensor, start: int, stop: int) -> None:
            if stop - start == numel:
                pack(gradients, self.gradient_plan, rows, scale=scale, stats=stats)
                gradients.clear()
                return
            part = self._parts.get((start, stop))
            if part is None:
                part = self._parts[start, stop] = PartOfRows.of(self.gradient_plan, start, stop)
            for i in part.begun:
                gradients[i] = gradients[i] if gradients[i] is None else gradients[i].reshape(-1)
            pack([None if i is None or gradients[i] is None else gradients[i][a:b] for i, a, b in part.pieces],
                 part.plan, rows, scale=scale)  # fmt: skip
            for i in part.finished:
                gradients[i] = None

        return fill

    def add_gradient(self, gradient: Tensor) -> None:
        """Takes this rank's part of the mean gradient. It is in the leaves' ``.grad`` after :meth:`settle_gradients`;
        until then it may be on its way to host memory."""
        if self.offload:
            self._arriving.append(gradient)
        else:
            self._add(gradient)

    def settle_gradients(self) -> None:
        """At the end of backward: every leaf that is trained has its gradient, zeros if there was none."""
        while self._arriving:
            self._add(self._arriving.pop(0))
        for leaf in self._trained_leaves():
            if leaf.parameter.grad is None:
                leaf.parameter.grad = torch.zeros_like(leaf.parameter)

    def forget_arriving(self) -> None:
        """After a backward that failed."""
        self._arriving.clear()
        self._stats.clear()

    def _trained_leaves(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if not leaf.frozen and leaf.parameter.requires_grad]

    @torch.no_grad()
    def _add(self, gradient: Tensor) -> None:
        squares, self._squares = self._stats.pop(0), None
        leaves = self._trained_leaves()
        if all(leaf.parameter.grad is None for leaf in leaves):
            for leaf in leaves:
                leaf.parameter.grad = gradient[leaf.start : leaf.stop]
        else:
            squares = torch.zeros(2, dtype=torch.float64, device=gradient.device)
            for leaf in leaves:
                part = gradient[leaf.start : leaf.stop]
                if leaf.parameter.grad is None:
                    leaf.parameter.grad = torch.zeros_like(part)
                of_leaf = torch.empty_like(squares)
                sum_rows(part.view(1, -1), leaf.parameter.grad, accumulate=True, stats=of_leaf)
                squares += of_leaf
        if squares is not None and all(leaf.parameter.requires_grad for leaf in self.leaves):
            now = [(weakref.ref(leaf.parameter.grad), leaf.parameter.grad._version) for leaf in leaves]
            self._squares = (squares[0], now)

    def sum_of_squares(self) -> Tensor:
        """Of this rank's gradients, fp64. The reduction computed it on its way; gradients are read again only where
        somebody changed them since (an unscaling optimizer, the user), or the backend's reduction is opaque."""
        gradients = [leaf.parameter.grad for leaf in self.leaves if leaf.parameter.grad is not None]
        if self._squares is not None:
            squares, known = self._squares
            if len(known) == len(gradients) and all(
                gradient is ref() and gradient._version == version
                for gradient, (ref, version) in zip(gradients, known, strict=True)
            ):
                return squares
        total = torch.zeros((), dtype=torch.float64, device=self.shard.device)
        for gradient in gradients:
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        return total
