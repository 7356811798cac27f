"""Checkpoints of sharded training: model, optimizer, scheduler, random states and what the caller adds.

Written and read through `torch.distributed.checkpoint` (DCP): each rank writes what it owns of each parameter and of
each tensor of the optimizer's state, under unsharded names and shapes, so that any other number of ranks can read it,
and so can any other tool that reads DCP. A folder holds generations and a pointer:

    directory/latest                        the name of the generation to resume from
    directory/checkpoint-00000007/          DCP's files, and manifest.json with their sizes and checksums

A generation is written under another name, flushed to disk and renamed before the pointer is replaced, so whenever a
process is killed, `latest` names a complete one.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_zero.zero.collectives import Communicator
from moe_zero.zero.flat_layer import FROZEN_PARAMS_IDX, FlatLayer, Leaf
from moe_zero.zero.generations import checksum, find_checkpoint, incoming_folder, prepare, publish, verify
from moe_zero.zero.sharded_module import ShardedModule

# DCP's remark that there is no process group, which is as it should be on one rank.
warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")

_OBJECTS = "objects"  # the entry with everything that is no tensor of the model or of the optimizer


def save_checkpoint(
    directory: str | os.PathLike,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping | None = None,
    *,
    keep: int = 2,
) -> Path:
    """Writes a new generation and makes it the latest. Collective; between steps.

    Args:
        directory: on a file system that all ranks see; made if absent.
        sharded: from :func:`moe_zero.zero.shard`, or a ``Zero3Layer`` or ``Zero3Sequential``.
        optimizer: built on its shards. Tensors in its state must be scalars or have the shape of their shard.
        scheduler: anything with ``state_dict()``.
        extra: rank 0's is saved, for example the position in the data: numbers, strings, tensors, lists and dicts of
            them.
        keep: number of generations that stay, at least 1.

    Returns:
        the path of the generation.

    Raises (on all ranks):
        ValueError, TypeError: an argument does not fit, or ``extra`` holds other objects.
        OSError, RuntimeError: it could not be written; the former latest generation is untouched.
    """
    return _stage(directory, sharded, optimizer, scheduler, extra, keep, copies=False).write()


def save_checkpoint_async(
    directory: str | os.PathLike,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping | None = None,
    *,
    keep: int = 2,
) -> PendingSave:
    """As :func:`save_checkpoint`, but returns as soon as everything was copied to host memory; training goes on while
    the copies are written. Collective; between steps.

    The former generation stays the latest until the new one is complete. The next save or load of the same model waits
    for this one, and raises what went wrong with it; so does the exit of the process wait (but not ``os._exit``).
    """
    return PendingSave(sharded, _stage(directory, sharded, optimizer, scheduler, extra, keep, copies=True))


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, sharded: ShardedModule, generation: _Generation):
        self._generation, self._error = generation, None
        written = generation.start()
        # No daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=self._finish, args=(written,), name="moe_zero checkpoint")
        self._thread.start()
        sharded._saving = self

    def _finish(self, written: Future) -> None:
        try:
            self._generation.finish(written)
        except Exception as error:
            self._error = error
            _failed.add(self)
        self._generation.planner = None  # the copies

    def done(self) -> bool:
        """Whether it is written, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The path of the generation, when it is written. Raises what went wrong, as ``save_checkpoint`` does."""
        self._thread.join()
        if self._error is not None:
            _failed.discard(self)
            raise self._error
        return self._generation.path


_failed: set[PendingSave] = set()  # that nobody was told of


@atexit.register
def _tell_of_failures() -> None:
    for pending in _failed:
        print(f"the checkpoint {pending._generation.path} was not written: {pending._error!r}", file=sys.stderr)


class _Generation:
    """All that a rank writes of one generation."""

    def __init__(self, comm: Communicator, directory: Path, name: str, planner: _Saver, keep: int):
        self.comm, self.planner, self.path = comm, planner, directory / name
        self._directory, self._name, self._keep = directory, name, keep
        self._incoming = incoming_folder(directory, name)

    def write(self) -> Path:
        written: Future = Future()
        try:
            with _ordinary_errors():
                written.set_result(self._call(dcp.save))
        except Exception as error:
            written.set_exception(error)
        self.finish(written)
        return self.path

    def start(self) -> Future:
        """Has DCP's thread write."""
        return self._call(dcp.async_save)

    def _call(self, save: Callable) -> Any:
        if self.comm.replica:
            written: Future = Future()
            written.set_result(None)  # the first replica writes
            return written
        return save(
            {},
            storage_writer=dcp.FileSystemWriter(self._incoming, sync_files=True),
            planner=self.planner,
            process_group=self.comm.process_group,
        )

    def finish(self, written: Future) -> None:
        """Checksums of what was written; then the generation becomes the latest."""
        comm, error, sums = self.comm, None, {}
        try:
            with _ordinary_errors():
                written.result()
            if comm.replica == 0:
                mine = sorted(self._incoming.glob(f"__{comm.rank}_*"))
                sums = {path.name: [path.stat().st_size, checksum(path)] for path in mine}
        except Exception as problem:
            error = problem
        comm.agree("save_checkpoint()", None, error)
        answers = comm.all_objects(sums, "save_checkpoint()")
        if comm.rank == 0 and comm.replica == 0:
            try:
                files = {file: entry for sums in answers for file, entry in sums.items()}
                publish(self._directory, self._name, files, self._keep)
            except OSError as problem:
                error = problem
        comm.agree("save_checkpoint()", None, error)


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """DCP's exception is no ``Exception``, so that callers would miss it: the first rank's failure in its place."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        kind = OSError if isinstance(cause, OSError) else RuntimeError
        raise kind(f"rank {rank}: {cause}") from error


def _finish_pending(sharded: ShardedModule) -> None:
    pending, sharded._saving = sharded._saving, None
    if pending is not None:
        pending.wait()


def _stage(
    directory: str | os.PathLike,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Mapping | None,
    keep: int,
    copies: bool,
) -> _Generation:
    """Collects what is to be written: tensors as they are or as ``copies`` of this moment, all else serialised."""
    _finish_pending(sharded)
    comm = sharded.comm
    directory = Path(directory)
    error, name, objects = None, None, None
    take = _copied if copies else torch.Tensor.detach
    try:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the generation just written stays, so 1 or more")
        entries = _model_entries(sharded, take)
        scalars, groups = {}, None
        if optimizer is not None:
            leaves = _leaves(sharded, optimizer)
            state_entries, scalars = _optimizer_entries(optimizer, leaves, take)
            entries += state_entries
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        objects = {
            "param_groups": groups,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "extra": None if extra is None else dict(extra),
            "world_size": comm.world_size,
        }
        _to_bytes(objects)  # so that what could not be read back is refused now
        if comm.rank == 0:
            name = prepare(directory)
    except (ValueError, TypeError, OSError) as problem:
        error = problem
    comm.agree("save_checkpoint()", keep, error)
    answers = comm.all_objects((name, scalars), "save_checkpoint()")
    name = answers[0][0]
    objects["scalars"] = {key: value for _, theirs in answers for key, value in theirs.items()}
    data = {f"random.{comm.rank}": _to_bytes(_random_states(comm.device))}
    if comm.rank == 0:
        data[_OBJECTS] = _to_bytes(objects)
    return _Generation(comm.beside(), directory, name, _Saver(entries, data, comm.rank == 0), keep)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def load_checkpoint(
    directory: str | os.PathLike,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict:
    """Restores what :func:`save_checkpoint` saved, whatever number of ranks saved it. Collective.

    Args:
        directory: as it was given to ``save_checkpoint`` (the latest generation is read), or one generation's folder.
        sharded, optimizer, scheduler: built as for a fresh run; the optimizer's options and state are replaced.
            ``None`` leaves that part out.

    Random states of Python, NumPy, PyTorch and the device are restored where as many ranks saved them.

    Returns:
        ``extra``, or an empty dict.

    Raises (on all ranks):
        FileNotFoundError: there is no checkpoint.
        ValueError: a file is damaged (it is named), or the checkpoint is of another model or optimizer; nothing was
            changed.
    """
    _finish_pending(sharded)
    comm = sharded.comm
    error, path, own_random = None, None, f"random.{comm.rank}"
    try:
        path = find_checkpoint(directory)
        verify(path, comm.rank, comm.world_size)
    except (ValueError, OSError) as problem:
        error = problem
    comm.agree("load_checkpoint()", path and str(path), error)
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        entries = _model_entries(sharded)
        _compare(entries, metadata, path)
        if optimizer is not None:
            leaves = _leaves(sharded, optimizer)
            states, state_entries = _new_states(leaves, metadata)
            entries += state_entries
    except (ValueError, TypeError, OSError) as problem:
        error = problem
    comm.agree("load_checkpoint()", None, error)
    # What belongs to it is looked at before anything is changed.
    objects = _Loader([], [_OBJECTS, *([own_random] if own_random in metadata.state_dict_metadata else [])])
    with _ordinary_errors():
        dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=objects, process_group=comm.process_group)
    objects, random_states = objects.data[_OBJECTS], objects.data.get(own_random)
    try:
        if optimizer is not None:
            _check_groups(optimizer, objects)
        if scheduler is not None and objects["scheduler"] is None:
            raise ValueError(f"{path} was saved without a scheduler")
    except ValueError as problem:
        error = problem
    comm.agree("load_checkpoint()", None, error)

    for layer in sharded.flat_layers:
        layer.free()
    comm.synchronize_gathers()
    with _ordinary_errors(), torch.no_grad():
        reader = dcp.FileSystemReader(path)
        dcp.load({}, storage_reader=reader, planner=_Loader(entries, []), process_group=comm.process_group)
    if optimizer is not None:
        _set_optimizer(optimizer, leaves, states, objects)
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])
    if objects["world_size"] == comm.world_size:
        _set_random_states(random_states, comm.device)
    return objects["extra"] or {}


# --- what is saved: entries of DCP ------------------------------------------------------------------------------------


class _Entry:
    """What this rank holds of one tensor of the checkpoint: boxes of it, and the memory they live in."""

    def __init__(self, path: tuple[str, ...], shape: Sequence[int], replicated: bool = False):
        self.key, self.path, self.shape = ".".join(path), path, torch.Size(shape)
        self.replicated = replicated  # every rank holds all of it, and rank 0 writes it
        self.boxes: dict[torch.Size, Tensor] = {}  # by offsets

    def add_run(self, start: int, values: Tensor) -> None:
        """``values`` [n] are the elements from ``start`` on, in row-major order."""
        taken = 0
        for offsets, sizes in boxes_of_run(self.shape, start, start + values.numel()):
            box = values[taken : taken + sizes.numel()].view(sizes)
            self.boxes[offsets] = box
            taken += sizes.numel()


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[torch.Size, torch.Size]]:
    """Splits the elements ``start`` to ``stop`` (row-major) of a tensor into boxes, in order: (offsets, sizes). At most
    two for each dimension but the last, and one more."""
    if len(shape) <= 1:
        yield (torch.Size([start]), torch.Size([stop - start])) if shape else (torch.Size(), torch.Size())
        return
    row = torch.Size(shape[1:]).numel()
    while start < stop:
        index, inside = divmod(start, row)
        whole_rows = (stop - start) // row
        if inside == 0 and whole_rows:
            yield torch.Size([index, *[0] * (len(shape) - 1)]), torch.Size([whole_rows, *shape[1:]])
            start += whole_rows * row
        else:
            end = min(stop, (index + 1) * row)
            for offsets, sizes in boxes_of_run(shape[1:], inside, inside + end - start):
                yield torch.Size([index, *offsets]), torch.Size([1, *sizes])
            start = end


def _model_entries(sharded: ShardedModule, take: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> list[_Entry]:
    """Shards and buffers, each as ``take`` gives it."""
    entries = []
    for layer in sharded.flat_layers:
        shard = take(layer.shard)
        of_slot = {slot.name: _Entry(("model", slot.name), slot.placeholder.shape) for slot in layer.slots}
        for slot, start, stop, begin in layer.pieces(sharded.comm.rank):
            of_slot[slot.name].add_run(begin, shard[start:stop])
        entries += of_slot.values()
    for name, owner, attribute in sharded._buffer_names:
        buffer = take(owner._buffers[attribute])
        entries.append(_Entry(("model", name), buffer.shape, replicated=True))
        entries[-1].boxes[torch.Size([0] * buffer.ndim)] = buffer
    return entries


def _leaves(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> list[tuple[FlatLayer, Leaf]]:
    """The leaves that an optimizer updates."""
    known = {id(leaf.parameter): (layer, leaf) for layer in sharded.flat_layers for leaf in layer.leaves}
    frozen = {id(layer.chunk[FROZEN_PARAMS_IDX]) for layer in sharded.flat_layers}  # have no state
    leaves = []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in frozen:
                continue
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer's group {i} has a parameter of shape {tuple(parameter.shape)} that is no trainable "
                    "shard of the model; build the optimizer on param_groups(), get_trainable_chunk() or parameters()"
                )
            leaves.append(known[id(parameter)])
    return leaves


def _runs(layer: FlatLayer, leaf: Leaf) -> Iterator[tuple[str, torch.Size, int, int, int]]:
    """The runs of parameters in a leaf: name, shape, start and stop in the leaf, start in the parameter."""
    for slot, start, stop, begin in layer.pieces(layer.comm.rank):
        if leaf.start <= start and stop <= leaf.stop:
            yield slot.name, slot.placeholder.shape, start - leaf.start, stop - leaf.start, begin


def _optimizer_entries(
    optimizer: torch.optim.Optimizer, leaves: list[tuple[FlatLayer, Leaf]], take: Callable[[Tensor], Tensor]
) -> tuple[list[_Entry], dict[str, dict[str, Any]]]:
    """State that has the shape of its shard, as entries; the rest (steps) by the names of parameters."""
    entries: dict[str, _Entry] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for layer, leaf in leaves:
        for key, value in optimizer.state.get(leaf.parameter, {}).items():
            of_shard = isinstance(value, Tensor) and value.shape == leaf.parameter.shape
            if isinstance(value, Tensor) and not of_shard and value.numel() > 1:
                raise ValueError(
                    f"the optimizer's state {key!r} for layer {layer.name!r} has shape {tuple(value.shape)}, the shard "
                    f"{tuple(leaf.parameter.shape)}; only state for each element can be read at another number of ranks"
                )
            value = take(value) if of_shard else value
            for name, shape, start, stop, begin in _runs(layer, leaf):
                if of_shard:
                    entry = _Entry(("optimizer", key, name), shape)
                    entries.setdefault(entry.key, entry).add_run(begin, value[start:stop])
                else:
                    scalars.setdefault(name, {})[key] = value
    return list(entries.values()), scalars


def _new_states(
    leaves: list[tuple[FlatLayer, Leaf]], metadata: Metadata
) -> tuple[dict[nn.Parameter, dict[str, Tensor]], list[_Entry]]:
    """Memory for the saved state of each leaf, to be read into."""
    saved: dict[str, list[str]] = {}
    for path in metadata.planner_data.values():
        if path[0] == "optimizer":
            saved.setdefault(path[2], []).append(path[1])
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    entries: dict[str, _Entry] = {}
    for layer, leaf in leaves:
        state = states[leaf.parameter] = {}
        for name, shape, start, stop, begin in _runs(layer, leaf):
            for key in saved.get(name, ()):
                entry = _Entry(("optimizer", key, name), shape)
                entry = entries.setdefault(entry.key, entry)
                if key not in state:
                    dtype = metadata.state_dict_metadata[entry.key].properties.dtype
                    state[key] = torch.zeros_like(leaf.parameter, dtype=dtype, requires_grad=False)
                entry.add_run(begin, state[key][start:stop])
    return states, list(entries.values())


def _compare(entries: list[_Entry], metadata: Metadata, path: Path) -> None:
    saved = {key: value.size for key, value in metadata.state_dict_metadata.items() if key.startswith("model.")}
    ours = {entry.key: entry.shape for entry in entries}
    # Empty tensors have no part that a rank could own, so they are not in the file.
    missing = [key for key, shape in ours.items() if shape.numel() and key not in saved]
    unexpected = [key for key in saved if key not in ours]
    if missing or unexpected:
        raise ValueError(f"{path} is of another model: it lacks {missing} and has {unexpected}")
    for key, shape in ours.items():
        if key in saved and saved[key] != shape:
            there = tuple(saved[key])
            raise ValueError(f"{path} is of another model: {key} has shape {there} there, {tuple(shape)} here")


def _check_groups(optimizer: torch.optim.Optimizer, objects: dict) -> None:
    groups = objects["param_groups"]
    if groups is None:
        raise ValueError("the checkpoint was saved without an optimizer")
    if len(groups) != len(optimizer.param_groups):
        ours = len(optimizer.param_groups)
        raise ValueError(f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has {ours}")


def _set_optimizer(optimizer, leaves, states, objects) -> None:
    for group, saved in zip(optimizer.param_groups, objects["param_groups"], strict=True):
        group.update(saved)
    for layer, leaf in leaves:
        state = states[leaf.parameter]
        for name, *_ in _runs(layer, leaf):
            for key, value in objects["scalars"].get(name, {}).items():
                state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        optimizer.state.pop(leaf.parameter, None)
        if state:
            optimizer.state[leaf.parameter] = state


# --- the planners of DCP ----------------------------------------------------------------------------------------------


class _Saver(SavePlanner):
    def __init__(self, entries: list[_Entry], data: dict[str, bytes], is_first: bool):
        self._entries = [entry for entry in entries if is_first or not entry.replicated]
        self._boxes = {(entry.key, offsets): box for entry in self._entries for offsets, box in entry.boxes.items()}
        self._data = data

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._data]
        for entry in self._entries:
            for offsets, box in entry.boxes.items():
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.shape),
                    properties=TensorProperties.create_from_tensor(box),
                    size=entry.shape,
                )
                items.append(
                    WriteItem(index=MetadataIndex(entry.key, offsets), type=WriteItemType.SHARD, tensor_data=data)
                )
        paths = {entry.key: entry.path for entry in self._entries} | {key: (key,) for key in self._data}
        return SavePlan(items, planner_data=paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {key: path for plan in all_plans for key, path in plan.planner_data.items()}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._data[write_item.index.fqn])
        box = self._boxes[write_item.index.fqn, write_item.index.offset]
        if box.device.type != "cpu" or box.numel() == 0 or not box.is_contiguous():
            return box
        # DCP copies what has no storage of its own, and keeps all copies until the file is written.
        return torch.frombuffer(box.reshape(-1).view(torch.uint8).numpy(), dtype=box.dtype).view(box.shape)


class _Loader(LoadPlanner):
    def __init__(self, entries: list[_Entry], keys: Sequence[str]):
        self._entries = entries
        self._boxes = {(entry.key, offsets): box for entry in entries for offsets, box in entry.boxes.items()}
        self._keys = keys
        self.data: dict[str, Any] = {}

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        whole = torch.Size([0])
        items = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), whole, MetadataIndex(key), whole, whole)
            for key in self._keys
        ]
        for entry in self._entries:
            if entry.key in self._saved:
                boxes = entry.boxes.items()
                chunks = [ChunkStorageMetadata(offsets=offsets, sizes=box.shape) for offsets, box in boxes]
                items += create_read_items_for_chunk_list(entry.key, self._saved[entry.key], chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        box = self._boxes[read_item.dest_index.fqn, read_item.dest_index.offset]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            box = box.narrow(dim, start, length)
        return box

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _to_bytes(value: object) -> bytes:
    """Serialised such that reading it executes nothing; ``TypeError`` for objects that this excludes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            "extra, the scheduler's state or the optimizer's options hold objects other than numbers, strings, "
            "tensors, lists, "
            f"tuples and dicts: {error}"
        ) from None
    return buffer.getvalue()


# --- random states ----------------------------------------------------------------------------------------------------


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
