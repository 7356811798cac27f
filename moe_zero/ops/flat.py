"""Flat buffers: many tensors to and from one contiguous buffer that is sharded over ranks.

``FlatPlan`` computes once how the tensors of a layer are laid out; ``pack`` and ``unpack`` copy by it, converting
dtypes on the way, in one pass and (on a GPU) one launch whatever the number of tensors. They are what ZeRO-3 (arXiv
1910.02054) does around its collectives: an all-gather fills the flat buffer [world_size, shard_bytes] and ``unpack``
writes the parameters; ``pack`` collects the gradients and a reduce-scatter averages them.

A list of very many tensors that is packed or written again and again is worth a ``TensorList``, which is read faster.

Operators (namespace ``moe_zero``): ``pack_``, ``unpack_``, ``sum_rows_``; all write into arguments and return nothing.
None is differentiable: they move data as ``copy_`` under ``torch.no_grad()`` does, and bump the version counters of
what they write, so that autograd notices saved tensors that were overwritten. Eager calls on plain tensors do the same
without the dispatcher, which costs half a microsecond for each tensor of a list.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_zero import _extensions

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Group(NamedTuple):
    """Tensors that are laid out together because they agree in trainability, tag and dtype."""

    trainable: bool
    tag: int
    dtype: torch.dtype  # as stored in the flat buffer
    members: tuple[int, ...]  # tensor indices, in order
    shard_numel: int  # elements of each rank
    element_offset: int  # of this group in a row, in elements
    byte_offset: int  # of this group in a row, in bytes


class Piece(NamedTuple):
    """A run of one tensor that is contiguous in one rank's row."""

    tensor: int
    tensor_start: int  # first element, in row-major order of the tensor
    rank: int
    byte_offset: int  # in the row
    count: int  # elements


def _dtype_name(dtype: "str | torch.dtype", argument: str) -> str:
    name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{argument} is {dtype}; a flat buffer holds {', '.join(DTYPES)}")
    return name


class FlatPlan:
    """How the tensors of one layer lie in a flat buffer of shape [world_size, shard_bytes] (bytes); rank r owns row r.

    Tensors are put in groups of equal (trainable, tag, dtype), trainable groups first; inside a group they keep their
    order. A group is the concatenation of its tensors, padded with zeros at the end so that it splits into
    ``world_size`` equal parts of a multiple of 16 elements; a row is the concatenation of one part of every group. So a
    tensor may cross several rows, and the trainable part of a row is a prefix of it.

    Args:
        sizes: number of elements of each tensor.
        dtypes: float64, float32, float16 or bfloat16 for each tensor, as ``torch.dtype`` or by name.
        trainable: for each tensor, whether an optimizer owns it.
        world_size: number of ranks, at least 1; it may exceed the number of elements.
        tags: an integer for each tensor, to keep tensors with different hyperparameters apart. Default: all 0.

    Immutable, hashable, picklable and comparable. Raises ``ValueError`` that names the bad argument.
    """

    __slots__ = (
        "_device_tables",
        "_layout",
        "dtypes",
        "flat_bytes",
        "groups",
        "shard_bytes",
        "single_dtype",
        "sizes",
        "table",
        "tags",
        "trainable",
        "trainable_bytes",
        "world_size",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        dtypes: "Sequence[str | torch.dtype]",
        trainable: Sequence[bool],
        world_size: int,
        tags: Sequence[int] | None = None,
    ) -> None:
        for argument, values in (("sizes", sizes), ("dtypes", dtypes), ("trainable", trainable), ("tags", tags or ())):
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"{argument} is {values!r}; it must be a sequence with an entry for each tensor")
        numbers = {f"sizes[{i}]": size for i, size in enumerate(sizes)} | {"world_size": world_size}
        for argument, value in (numbers | {f"tags[{i}]": tag for i, tag in enumerate(tags or ())}).items():
            if not isinstance(value, int) or not -(2**63) <= value < 2**63:
                raise TypeError(f"{argument} is {value!r}; it must be an integer of at most 64 bits")
        names = [_dtype_name(dtype, f"dtypes[{i}]") for i, dtype in enumerate(dtypes)]
        self._set_layout(_layout_class()(list(sizes), names, list(trainable), world_size, tags))

    def _set_layout(self, layout) -> None:
        groups = tuple(Group(g[0], g[1], DTYPES[g[2]], *g[3:]) for g in layout.groups)
        dtypes: list[torch.dtype | None] = [None] * len(layout.sizes)
        for group in groups:
            for i in group.members:
                dtypes[i] = group.dtype
        values = {
            "_layout": layout,
            "_device_tables": {},
            "world_size": layout.world_size,
            "sizes": layout.sizes,
            "dtypes": tuple(dtypes),
            "trainable": layout.trainable,
            "tags": layout.tags,
            "groups": groups,
            "shard_bytes": layout.shard_bytes,
            "trainable_bytes": layout.trainable_bytes,
            "flat_bytes": layout.world_size * layout.shard_bytes,
            "single_dtype": groups[0].dtype if len({g.dtype for g in groups}) == 1 else None,
            "table": torch.frombuffer(layout.table(), dtype=torch.int64),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"FlatPlan is immutable; build a new one instead of setting {name!r}")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Runs of tensors in the flat buffer, in the order of the buffer; padding is left out."""
        return tuple(Piece(*piece) for piece in self._layout.pieces)

    def shard_numel(self, trainable: bool) -> int:
        """Elements that each rank owns of the trainable or of the frozen tensors, padding included."""
        return sum(group.shard_numel for group in self.groups if group.trainable == trainable)

    def cast(self, dtype: "str | torch.dtype", trainable_only: bool = False) -> "FlatPlan":
        """The same partition of the same elements, stored in ``dtype`` throughout: the layout of gradients and of fp32
        master shards. Groups stay as they are, in elements. With ``trainable_only``, a plan of the trainable tensors
        alone (in their order), whose rows are the trainable prefix of this plan's rows."""
        plan = object.__new__(FlatPlan)
        plan._set_layout(self._layout.cast(_dtype_name(dtype, "dtype"), trainable_only))
        return plan

    def device_table(self, device: torch.device) -> Tensor | None:
        """What CUDA kernels read: ``table`` and the tiles of the thread blocks in the memory of ``device``, copied once
        and kept (so call it, or ``pack`` or ``unpack``, once before a CUDA graph is captured). None for a CPU."""
        if device.type != "cuda":
            return None
        table = self._device_tables.get(device)
        if table is None:
            tiles = torch.frombuffer(self._layout.tiles() or bytearray(16), dtype=torch.int64)
            table = self._device_tables[device] = torch.cat([self.table, tiles]).to(device)
        return table

    def _state(self) -> tuple:
        layout = self._layout
        return (layout.sizes, layout.grouping_dtypes, layout.trainable, self.world_size, layout.tags, layout.stored)

    def __reduce__(self):
        return _plan_from_state, self._state()

    def __eq__(self, other: object) -> bool:
        return self._layout == other._layout if isinstance(other, FlatPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._layout)

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{'trainable' if g.trainable else 'frozen'}{f' tag {g.tag}' if g.tag else ''} {_NAMES[g.dtype]}: "
            f"{len(g.members)} tensors, {g.shard_numel:,} per rank"
            for g in self.groups
        )
        return (
            f"FlatPlan({len(self.sizes)} tensors, {sum(self.sizes):,} elements over {self.world_size} ranks, "
            f"{self.shard_bytes:,} bytes per rank; {groups or 'no groups'})"
        )


def _layout_class():
    if _extensions.flat_plan is None:
        raise ImportError(f"FlatPlan needs the compiled extension: {_extensions.extensions()[0].reason}")
    return _extensions.flat_plan.Layout


def _plan_from_state(sizes, dtypes, trainable, world_size, tags, stored) -> FlatPlan:
    plan = object.__new__(FlatPlan)
    plan._set_layout(_layout_class()(list(sizes), list(dtypes), list(trainable), world_size, list(tags), stored))
    return plan


def _bytes(flat: Tensor) -> Tensor:
    return flat.reshape(-1).view(torch.uint8)


def _compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _write_stats(stats: Tensor | None, values: Sequence[Tensor]) -> None:
    if stats is not None:
        squares = [value.double().square().sum() for value in values]
        finite = [value.isfinite().all() for value in values]
        zero = torch.zeros((), dtype=torch.float64, device=stats.device)
        stats[0] = torch.stack([zero, *squares]).sum()
        stats[1] = 1 - torch.stack([zero + 1, *finite]).min()


def pack_reference(
    tensors: Sequence[Tensor | None],
    plan: FlatPlan,
    out: Tensor | None = None,
    *,
    scale: float = 1.0,
    stats: Tensor | None = None,
) -> Tensor:
    """``pack`` in plain PyTorch: the definition, and what runs where the compiled operators are not available."""
    out = _new_flat(tensors, plan) if out is None else out
    _check_pack(tensors, plan, out, stats)
    for i, tensor in enumerate(tensors):
        if tensor is not None and _share_memory(tensor, out):
            raise ValueError(f"tensors[{i}] shares memory with the flat buffer")
    rows = _bytes(out).view(plan.world_size, plan.shard_bytes)
    rows.zero_()
    written = []
    with torch.no_grad():
        for tensor, start, rank, byte, count in plan.pieces:
            source, dtype = tensors[tensor], plan.dtypes[tensor]
            if source is None:
                continue
            piece = source.reshape(-1)[start : start + count]
            if scale != 1:
                piece = piece.to(_compute_dtype(piece.dtype, dtype)) * scale
            target = rows[rank, byte : byte + count * dtype.itemsize].view(dtype)
            target.copy_(piece)
            written.append(target)
        _write_stats(stats, written)
    return out


def unpack_reference(flat: Tensor, plan: FlatPlan, tensors: Sequence[Tensor], *, accumulate: bool = False) -> None:
    """``unpack`` in plain PyTorch: the definition, and what runs where the compiled operators are not available."""
    _check_unpack(flat, plan, tensors)
    for i, tensor in enumerate(tensors):
        if _share_memory(tensor, flat):
            raise ValueError(f"tensors[{i}] shares memory with the flat buffer")
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(f"tensors[{i}] shares memory with itself; each element must be written once")
    _check_apart(tensors)
    rows = _bytes(flat).view(plan.world_size, plan.shard_bytes)
    whole = {i: [] for i in range(len(tensors))}
    for tensor, _, rank, byte, count in plan.pieces:
        dtype = plan.dtypes[tensor]
        whole[tensor].append(rows[rank, byte : byte + count * dtype.itemsize].view(dtype))
    with torch.no_grad():
        for i, pieces in whole.items():
            if pieces:
                value = torch.cat(pieces).view(tensors[i].shape)
                tensors[i].add_(value) if accumulate else tensors[i].copy_(value)


def sum_rows_reference(
    rows: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False, stats: Tensor | None = None
) -> None:
    """``sum_rows`` in plain PyTorch."""
    with torch.no_grad():
        dtype = _compute_dtype(rows.dtype, out.dtype)
        total = rows[0].to(dtype)
        for row in rows[1:]:
            total = total + row.to(dtype)
        if scale != 1:
            total = total * scale
        out.copy_(out.to(dtype) + total if accumulate else total)
        _write_stats(stats, [out])


def _has_addresses(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _check_apart(tensors: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` where dense tensors share memory with each other."""
    ranges = sorted((*_address_range(t), i) for i, t in enumerate(tensors) if _has_addresses(t) and t.is_contiguous())
    for (_, end, i), (begin, _, j) in pairwise(ranges):  # sorted by address, neighbours overlap if any do
        if begin < end:
            first, second = sorted((i, j))
            raise ValueError(f"tensors[{first}] and tensors[{second}] share memory; each element must be written once")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors with data overlap."""
    if not _has_addresses(a) or not _has_addresses(b):
        return False
    (a_begin, a_end), (b_begin, b_end) = _address_range(a), _address_range(b)
    return a_begin < b_end and b_begin < a_end


def _address_range(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _new_flat(tensors: Sequence[Tensor | None], plan: FlatPlan) -> Tensor:
    _check_types(tensors)
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    if plan.single_dtype is None:
        return torch.empty(plan.flat_bytes, dtype=torch.uint8, device=device)
    return torch.empty(plan.flat_bytes // plan.single_dtype.itemsize, dtype=plan.single_dtype, device=device)


def _check_types(tensors: Sequence[Tensor | None]) -> None:
    if isinstance(tensors, Tensor):
        raise TypeError("tensors is a single tensor; it must be a sequence of them")
    for i, tensor in enumerate(tensors):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{i}] is a {type(tensor).__name__}; it must be a tensor or None")


def _check_flat(flat: Tensor, plan: FlatPlan, name: str) -> None:
    if not isinstance(flat, Tensor):
        raise TypeError(f"{name} is a {type(flat).__name__}; it must be a tensor")
    if flat.dtype not in (torch.uint8, plan.single_dtype):
        need = "uint8" if plan.single_dtype is None else f"uint8 or {plan.single_dtype}"
        raise ValueError(f"{name} has dtype {flat.dtype}, but the plan needs {need}")
    if not flat.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    if flat.numel() * flat.dtype.itemsize != plan.flat_bytes:
        raise ValueError(
            f"{name} has {flat.numel() * flat.dtype.itemsize} bytes, but the plan needs {plan.flat_bytes} "
            f"(world_size {plan.world_size} * shard_bytes {plan.shard_bytes})"
        )


def _check_tensors(tensors: Sequence[Tensor | None], plan: FlatPlan, flat: Tensor, name: str) -> None:
    _check_types(tensors)
    if len(tensors) != len(plan.sizes):
        raise ValueError(f"tensors has {len(tensors)} entries, but the plan was made for {len(plan.sizes)}")
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.numel() != plan.sizes[i]:
            raise ValueError(f"tensors[{i}] has {tensor.numel()} elements, but the plan was made for {plan.sizes[i]}")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensors[{i}] has dtype {tensor.dtype}; it must be one of {', '.join(DTYPES)}")
        if tensor.device != flat.device:
            raise ValueError(f"tensors[{i}] is on {tensor.device}, but {name} is on {flat.device}")


def _check_stats(stats: Tensor | None, device: torch.device) -> None:
    if stats is None:
        return
    if stats.dtype not in (torch.float32, torch.float64) or stats.shape != (2,) or stats.device != device:
        raise ValueError(
            f"stats must be a float32 or float64 tensor of shape [2] on {device}, but it is {stats.dtype} of shape "
            f"{list(stats.shape)} on {stats.device}"
        )


def _check_pack(tensors: Sequence[Tensor | None], plan: FlatPlan, out: Tensor, stats: Tensor | None) -> None:
    _check_flat(out, plan, "out")
    _check_tensors(tensors, plan, out, "out")
    _check_stats(stats, out.device)


def _check_unpack(flat: Tensor, plan: FlatPlan, tensors: Sequence[Tensor]) -> None:
    _check_flat(flat, plan, "flat")
    for i, tensor in enumerate(tensors):
        if tensor is None:
            raise ValueError(f"tensors[{i}] is None; unpack needs a tensor to write to")
        if not torch.compiler.is_compiling() and tensor.is_neg():
            raise ValueError(f"tensors[{i}] is a lazily negated view; it cannot be written")
    _check_tensors(tensors, plan, flat, "flat")


# --- operators -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("moe_zero", "FRAGMENT")
_library.define(
    "pack_(Tensor(a!) flat, Tensor?[] tensors, Tensor table, Tensor? device_table, float scale, Tensor(b!)? stats, "
    "Tensor(c!)? workspace) -> ()"
)
_library.define("unpack_(Tensor(a!)[] tensors, Tensor flat, Tensor table, Tensor? device_table, bool accumulate) -> ()")
_library.define("hold(Tensor?[] tensors) -> int")
_library.define(
    "sum_rows_(Tensor(a!) out, Tensor rows, float scale, bool accumulate, Tensor(b!)? stats, Tensor(c!)? workspace) "
    "-> ()"
)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _bump_version(name: str, written: Callable[..., Sequence[Tensor]]) -> None:
    """Operators written in C++ do not tell autograd what they overwrite; this kernel, which runs before them, does."""
    operator = getattr(torch.ops.moe_zero, name).default

    def kernel(keyset, *args):
        operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version(written(*args))

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


@torch.library.register_fake("moe_zero::pack_", lib=_library)
def _(flat, tensors, table, device_table, scale, stats, workspace):
    return None


@torch.library.register_fake("moe_zero::unpack_", lib=_library)
def _(tensors, flat, table, device_table, accumulate):
    return None


@torch.library.register_fake("moe_zero::sum_rows_", lib=_library)
def _(out, rows, scale, accumulate, stats, workspace):
    return None


_bump_version("pack_", lambda flat, *args: _present(flat, *args[-2:]))
_bump_version("unpack_", lambda tensors, *args: tensors)
_bump_version("sum_rows_", lambda out, *args: _present(out, *args[-2:]))


# --- public functions ------------------------------------------------------------------------------------------------


def _backend(flat: Tensor) -> ModuleType | None:
    """The compiled operators for this tensor, or None: then the reference does the work. So it does for fake tensors,
    which no operator takes together with the plan's table, a real tensor."""
    if not isinstance(flat, Tensor) or isinstance(flat, FakeTensor):
        return None
    if flat.device.type == "cpu":
        return _extensions.ops_cpu
    return _extensions.ops_cuda if flat.device.type == "cuda" else None


def _eager() -> bool:
    """Whether nothing wants to see the operator, so that a call can skip the dispatcher."""
    return not (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled()
    )


class TensorList(tuple):
    """Tensors (or ``None``) that ``pack`` and ``unpack`` take many times: a tuple that is read without Python.

    Reading an ordinary list costs 80 ns for each tensor, which is most of the time where many are small; this one a
    quarter. The tensors may be written, resized, moved, or lose their memory and get another in between: each call
    looks at them as they are. Strided tensors, subclasses and fake tensors work at the usual speed.
    """

    _held: object  # of the C++ side, which keeps references to the tensors; None without it

    def __new__(cls, tensors: "Sequence[Tensor | None]" = ()) -> "TensorList":
        _check_types(tensors)
        self = super().__new__(cls, tensors)
        self._held = None
        present = [tensor for tensor in self if tensor is not None]
        plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_neg() for tensor in present)
        if present and plain and _extensions.ops_cpu is not None and _eager():
            with torch.no_grad():
                self._held = _extensions.ops_cpu.own(torch.ops.moe_zero.hold(list(self)))
        return self

    def __reduce__(self):
        return TensorList, (tuple(self),)


def _held(tensors: Sequence[Tensor | None]) -> object:
    return tensors._held if type(tensors) is TensorList else None


_SUM_ROWS_TILE = 4096  # kSumRowsTile of csrc/flat_tiles.h


def _workspace(stats: Tensor | None, words: int) -> Tensor | None:
    """On a GPU every thread block leaves its share of the sums here, to be added in order: the same bits every time."""
    if stats is None or not stats.is_cuda:
        return None
    return torch.empty(words, dtype=torch.float64, device=stats.device)


def pack(
    tensors: Sequence[Tensor | None],
    plan: FlatPlan,
    out: Tensor | None = None,
    *,
    scale: float = 1.0,
    stats: Tensor | None = None,
) -> Tensor:
    """Copy many tensors into one flat buffer, converted to the plan's dtypes and multiplied by ``scale``.

    One pass over memory, one kernel launch on a GPU. Arithmetic is in fp32, or fp64 as soon as source or destination
    is fp64, and rounded to nearest even (from fp64 to 16 bits by way of fp32, as PyTorch does); without scale and
    conversion bits are copied.

    Args:
        tensors: one for each size of the plan, of that many elements in row-major order, with any shape, strides and
            floating dtype, all on one device. ``None`` stands for zeros.
        plan: the layout.
        out: contiguous, of ``plan.world_size * plan.shard_bytes`` bytes, uint8 or the plan's dtype if it has only one;
            allocated if absent. Padding is set to zero.
        scale: factor, for example 1 / world size for averages.
        stats: float32 or float64 tensor of shape [2] that receives the sum of squares of what was written (added up in
            fp64) and 1.0 if any of it was inf or NaN, else 0.0.

    Returns:
        ``out``. Not differentiable.

    Raises:
        ValueError: sizes, dtypes or devices do not fit, or a tensor shares memory with ``out``. Nothing was written.
    """
    if out is None:
        out = _new_flat(tensors, plan)
    backend = _backend(out)
    if backend is None:
        return pack_reference(tensors, plan, out, scale=scale, stats=stats)
    _check_flat(out, plan, "out")
    table = plan.device_table(out.device)
    workspace = _workspace(stats, 0 if table is None else table.numel() - plan.table.numel())
    if _eager() and backend.pack(out, tensors, _held(tensors), plan.table, table, scale, stats, workspace):
        torch.autograd.graph.increment_version(out if stats is None else (out, stats))
        return out
    _check_tensors(tensors, plan, out, "out")
    _check_stats(stats, out.device)
    with torch.no_grad():
        sources = [tensor if tensor is None else tensor.resolve_neg() for tensor in tensors]
        torch.ops.moe_zero.pack_(out, sources, plan.table, table, scale, stats, workspace)
    return out


def unpack(flat: Tensor, plan: FlatPlan, tensors: Sequence[Tensor], *, accumulate: bool = False) -> None:
    """Copy a flat buffer [world_size, shard_bytes] into the tensors it is made of, converting to their dtypes.

    One pass over memory, one kernel launch on a GPU: what follows an all-gather.

    Args:
        flat: contiguous, of ``plan.world_size * plan.shard_bytes`` bytes, uint8 or the plan's dtype if it has only one.
        plan: the layout.
        tensors: one for each size of the plan, with any shape, strides and floating dtype, on the device of ``flat``.
            They are written in row-major order of their elements, as by ``copy_`` under ``torch.no_grad()``.
        accumulate: add to the tensors instead (in fp32, or fp64 if either side is fp64, rounded once).

    Raises:
        ValueError: sizes, dtypes or devices do not fit, or tensors share memory with each other or with ``flat``.
            Nothing was written.
    """
    backend = _backend(flat)
    if backend is None:
        return unpack_reference(flat, plan, tensors, accumulate=accumulate)
    _check_flat(flat, plan, "flat")
    table = plan.device_table(flat.device)
    if _eager() and backend.unpack(flat, tensors, _held(tensors), plan.table, table, accumulate):
        return torch.autograd.graph.increment_version(tensors)
    _check_unpack(flat, plan, tensors)
    with torch.no_grad():
        torch.ops.moe_zero.unpack_(list(tensors), flat, plan.table, table, accumulate)


def sum_rows(
    rows: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False, stats: Tensor | None = None
) -> None:
    """``out = scale * rows.sum(0)``, or ``out += ...``: the local half of a reduce-scatter made of one all-to-all.

    Added in the order of the rows in fp32 (fp64 if either side is fp64) and rounded once: the same bits every time.

    Args:
        rows: contiguous [world_size, n], any floating dtype.
        out: contiguous, n elements, any floating dtype, no memory shared with ``rows``.
        scale: factor on the sum, for example 1 / world_size.
        accumulate: add to ``out``.
        stats: as in ``pack``, about what was written to ``out``.
    """
    if _backend(out) is None:
        return sum_rows_reference(rows, out, scale=scale, accumulate=accumulate, stats=stats)
    _check_stats(stats, out.device)
    workspace = _workspace(stats, 2 * -(-out.numel() // _SUM_ROWS_TILE))
    with torch.no_grad():
        torch.ops.moe_zero.sum_rows_(out, rows, scale, accumulate, stats, workspace)
