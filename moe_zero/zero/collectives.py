"""The collectives of the sharding engine: ordered, asynchronous, counted, and checked to be the same on all ranks.

Gathers and reductions run in two lanes. A lane has a communicator of its own (so that neither kind waits for the other)
and executes what it is given in order, on a stream of its own with NCCL and on a thread of its own otherwise. Before a
collective starts, the ranks compare which layer they mean: two layers of equal size taken for each other would
otherwise give wrong weights in silence, and layers of different size abort the process inside gloo.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_zero.ops.flat import sum_rows

# torch 2.14 renamed the two collectives; the former names warn there, the new ones do not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CHUNK_BYTES = 4 << 20
"""Of the rows that are packed, exchanged and summed at a time, on a CPU. A collective call for each costs little, and
memory that is written again is not fetched from the system again."""

_ALIGNED = 16  # elements, as the rows of a FlatPlan

REDUCE_ALGORITHMS = ("auto", "all_to_all", "reduce_scatter")


@dataclass
class Traffic:
    """What one kind of collective moved: calls, payload bytes (the full, unsharded buffer), and seconds that the
    computation waited for it."""

    calls: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


@dataclass
class Statistics:
    """Traffic by kind of collective (``all_gather``, ``reduce_scatter``; with offload on one rank ``copy_to_device``,
    ``copy_to_host``), in total and per layer. ``reset()`` zeroes it."""

    total: dict[str, Traffic] = field(default_factory=dict)
    layers: dict[str, dict[str, Traffic]] = field(default_factory=dict)

    def reset(self) -> None:
        self.total.clear()
        self.layers.clear()

    def count(self, kind: str, layer: str, num_bytes: int) -> None:
        for traffic in self._of(kind, layer):
            traffic.calls += 1
            traffic.bytes += num_bytes

    def waited(self, kind: str, layer: str, seconds: float) -> None:
        for traffic in self._of(kind, layer):
            traffic.wait_seconds += seconds

    def _of(self, kind: str, layer: str) -> tuple[Traffic, Traffic]:
        per_layer = self.layers.setdefault(layer, {})
        return self.total.setdefault(kind, Traffic()), per_layer.setdefault(kind, Traffic())


class _ThreadLane:
    """Runs collectives in order on a thread: how they overlap with computation on backends without streams."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_run_tasks, args=(self._tasks,), name=name, daemon=True).start()
        # The thread refers to the queue alone, so that the lane can be collected and end it.
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, collective: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        future: Future = Future()
        self._tasks.put((future, collective))
        return future.result


def _run_tasks(tasks: queue.SimpleQueue) -> None:
    failure = None
    while (task := tasks.get()) is not None:
        future, collective = task
        try:
            # The ranks are out of step once a collective failed: later ones would wait for a time-out, or mix layers.
            if failure is not None:
                raise failure
            with torch.no_grad():
                result = collective()
        except BaseException as error:
            failure = error
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del task, future, collective  # not until the next task: they hold buffers


class _StreamLane:
    """Runs collectives in order on a CUDA stream. The collective waits for what the computation has queued so far, and
    ``wait`` makes the computation wait for the collective; the host waits for neither."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, collective: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            result = collective()
        done = self._stream.record_event()

        def wait() -> Tensor | None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(done)
            if result is not None and result.is_cuda:
                result.record_stream(computing)
            return result

        return wait

    def synchronize(self) -> None:
        self._stream.synchronize()


class Pending:
    """A collective under way. ``wait()`` returns its result as soon as it may be read, and raises what went wrong."""

    def __init__(
        self, wait: Callable[[], Tensor | None], kind: str, layer: str, statistics: Statistics, rank: int, buffers
    ):
        self._wait, self._kind, self._layer, self._statistics, self._rank = wait, kind, layer, statistics, rank
        self._buffers = buffers  # kept until the computation waits, so that no other stream is given their memory

    def wait(self) -> Tensor | None:
        start = time.perf_counter()
        try:
            result = self._wait()
        except RanksDisagree:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank}: {self._kind} of layer {self._layer!r} failed; another rank ended or did not reach "
                f"it within the time-out. From the backend: {error}"
            ) from error
        self._wait = self._buffers = None
        self._statistics.waited(self._kind, self._layer, time.perf_counter() - start)
        return result


class RanksDisagree(RuntimeError):
    """Ranks issued different collectives, or were given different models or arguments."""


class Communicator:
    """Collectives over the ranks that share the layers of one model.

    Args:
        process_group: the ranks that the parameters are sharded over. ``None``: the default group; without any process
            group the world size is 1 and nothing is communicated.
        replicate_group: ranks that hold the same shard (one of each sharding group), over which gradients are averaged
            too: a 2-D mesh that shards inside a node and replicates across nodes.
        device: where shards live.
        reduce_algorithm: ``reduce_scatter``, or ``all_to_all`` followed by a local sum in fp32: on gloo, whose
            reduce-scatter moves as many bytes as an all-reduce, it moves half. ``auto``: all-to-all except on NCCL.
        timeout: of the collectives made here; default: that of PyTorch's process groups.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        replicate_group: dist.ProcessGroup | None = None,
        reduce_algorithm: str = "auto",
        timeout: timedelta | None = None,
    ):
        distributed = dist.is_available() and dist.is_initialized()
        if process_group is None and distributed:
            process_group = dist.group.WORLD
        if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group does not contain this rank; pass each rank the group that it is in")
        self.device = device
        self.process_group = process_group
        self.replicate_group = replicate_group
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.world_size = dist.get_world_size(process_group) if distributed else 1
        self.replica = dist.get_rank(replicate_group) if replicate_group is not None else 0
        self.replicas = dist.get_world_size(replicate_group) if replicate_group is not None else 1
        self.statistics = Statistics()
        self._layers: list[str] = []
        self._timeout = timeout
        self._on_streams = device.type == "cuda"
        self._reduce_algorithm = reduce_algorithm
        self._sum_locally = reduce_algorithm == "all_to_all" or (reduce_algorithm == "auto" and not self._on_streams)
        self._lanes: dict[str, tuple] | None = None
        self._beside: Communicator | None = None

    def check(self) -> None:
        """Raises ``ValueError`` for arguments that do not fit."""
        if self._reduce_algorithm not in REDUCE_ALGORITHMS:
            allowed = ", ".join(REDUCE_ALGORITHMS)
            raise ValueError(f"reduce_algorithm is {self._reduce_algorithm!r}; it must be one of {allowed}")
        if self._on_streams and self.world_size > 1:
            backend = dist.get_backend(self.process_group)
            if "nccl" not in backend:
                raise ValueError(
                    f"the shards are on {self.device}, but the process group's backend is {backend!r}, not 'nccl'"
                )

    @property
    def alone(self) -> bool:
        """One rank: nothing to communicate."""
        return self.world_size == 1 and self.replicas == 1

    def beside(self) -> Communicator:
        """Another one over the same ranks, over gloo, for what goes on beside training on other threads. Collective the
        first time."""
        if self._beside is None:
            replicate = self.replicate_group and self._new_group(self.replicate_group, backend="gloo")
            own = self.process_group and self._new_group(self.process_group, backend="gloo")
            self._beside = Communicator(own, torch.device("cpu"), replicate_group=replicate, timeout=self._timeout)
        return self._beside

    def register(self, layer: str) -> int:
        """Gives a layer its number, the same on all ranks that register the same layers."""
        self._layers.append(layer)
        return len(self._layers) - 1

    # -- before training ---------------------------------------------------------------------------------------------

    def agree(self, what: str, value: object, error: Exception | None = None) -> None:
        """Raises on all ranks alike if one has an ``error``, or if ``value`` differs. Collective."""
        if self.alone:
            if error is not None:
                raise error
            return
        answers = self._all_objects((None if error is None else f"{type(error).__name__}: {error}", value), what, error)
        failed = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0] is not None}
        if error is not None:
            raise error
        if failed:
            raise RanksDisagree("; ".join(f"rank {rank} refuses {what}: {message}" for rank, message in failed.items()))
        for rank, (_, other) in enumerate(answers):
            if other != answers[0][1]:
                raise RanksDisagree(f"{what} differs between ranks: {_difference(answers[0][1], 0, other, rank)}")

    def _all_objects(self, value: object, what: str, cause: Exception | None = None) -> list:
        answers: list = [None] * self.world_size
        try:
            dist.all_gather_object(answers, value, group=self.process_group)
            if self.replicate_group is not None:
                columns: list = [None] * self.replicas
                dist.all_gather_object(columns, answers, group=self.replicate_group)
                answers = [answer for column in columns for answer in column]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: {what} failed; another rank ended or did not reach it within the time-out. From "
                f"the backend: {error}"
            ) from (cause or error)
        return answers

    def all_objects(self, value: object, what: str) -> list:
        """Every rank's ``value``, in the order of ranks. Collective; ``what`` is named where it fails."""
        return [value] if self.alone else self._all_objects(value, what)

    def scatter_rows(self, row: Tensor, rows: Tensor | None) -> None:
        """``row`` of each rank from rank 0's ``rows`` [world_size, ...]."""
        if self.world_size == 1:
            row.copy_(rows[0])
        else:
            dist.scatter(row, list(rows) if self.rank == 0 else None, group=self.process_group, group_src=0)
        if self.replicas > 1:
            dist.broadcast(row, group=self.replicate_group, group_src=0)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values to all."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)
        if self.replicas > 1:
            dist.broadcast(tensor, group=self.replicate_group, group_src=0)

    # -- in training -------------------------------------------------------------------------------------------------

    def gather(self, rows: Tensor, row: Tensor, layer: int) -> Pending:
        """Fills ``rows`` [world_size * n] with the ``row`` [n] of every rank, which may lie in host memory."""
        lane, group, check = self._lane("all_gather")
        name = self._layers[layer]
        kind = "all_gather" if self.world_size > 1 else "copy_to_device"
        self.statistics.count(kind, name, rows.nbytes)

        def collective() -> None:
            if self.world_size == 1:
                rows.copy_(row, non_blocking=True)
                return
            self._check(check, "all_gather", layer)
            _all_gather(rows, row.to(rows.device, non_blocking=True), group=group)

        return Pending(lane.submit(collective), kind, name, self.statistics, self.rank, (rows, row))

    def squares_of_sums(self, rows_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether :meth:`reduce` ends in a sum of its own, which knows the sum of squares of what it writes."""
        one_part = self.world_size == 1 or not self._sum_locally
        return self.replicas == 1 and not (one_part and rows_dtype == dtype)

    def reduce(
        self,
        fill: Callable[[Tensor, int, int], None],
        numel: int,
        rows_dtype: torch.dtype,
        dtype: torch.dtype,
        layer: int,
        *,
        stats: Tensor | None = None,
        host: Tensor | None = None,
    ) -> Pending:
        """The sum over ranks of their rows [world_size, numel] of ``rows_dtype``, row ``rank`` of it, averaged over
        replicas: the result, [numel] of ``dtype``.

        Args:
            fill: ``fill(rows, start, stop)`` writes the elements from ``start`` to ``stop`` of every row into ``rows``
                [world_size * (stop - start)]. The parts come in order, each once; where the rows are summed locally on
                a CPU, they are so small that two buffers of ``CHUNK_BYTES`` are all that a reduction needs besides
                what it reads and its result. On a CPU it is called on the lane's thread.
            stats: [2], fp64, whose first element receives the sum of squares of the result, where
                :meth:`squares_of_sums`.
            host: [numel], pinned: the result is copied there, complete after :meth:`synchronize`, and ``host``
                returned.
        """
        lane, group, check = self._lane("reduce_scatter")
        name = self._layers[layer]
        kind = "copy_to_host" if self.alone else "reduce_scatter"
        self.statistics.count(kind, name, self.world_size * numel * rows_dtype.itemsize)
        size = max(numel, 1)
        if self._sum_locally and self.world_size > 1 and not self._on_streams:
            size = min(size, max(CHUNK_BYTES // (self.world_size * rows_dtype.itemsize * _ALIGNED), 1) * _ALIGNED)
        filled = None
        if self._on_streams:  # by the computing stream, so that what it reads may be given up at once
            filled = torch.empty(self.world_size * numel, dtype=rows_dtype, device=self.device)
            fill(filled, 0, numel)

        def collective() -> Tensor:
            self._check(check, "reduce_scatter", layer)
            out = None
            if stats is not None:
                stats.zero_()
            rows = torch.empty(self.world_size * size, dtype=rows_dtype) if filled is None else filled
            parts_received = self.world_size if self._sum_locally else 1
            received = rows.new_empty(0 if self.world_size == 1 else parts_received * size)
            for start in range(0, max(numel, 1), size):
                stop = min(start + size, numel)
                sent = rows[: self.world_size * (stop - start)]
                if filled is None:
                    fill(sent, start, stop)
                parts = self._exchange(sent, received, group)
                if len(parts) == 1 and parts.dtype == dtype:
                    out = parts[0]
                    continue
                if out is None:
                    out = torch.empty(numel, dtype=dtype, device=self.device)
                of_part = None if stats is None else torch.empty_like(stats)
                sum_rows(parts, out[start:stop], stats=of_part)
                if stats is not None:
                    stats.add_(of_part)
            if self.replicas > 1:
                out.div_(self.replicas)
                dist.all_reduce(out, group=self._lanes["replicate"][1])
            return out if host is None else host.copy_(out, non_blocking=True)

        return Pending(lane.submit(collective), kind, name, self.statistics, self.rank, (filled,))

    def _exchange(self, rows: Tensor, received: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """What sums up to this rank's part of the sum of all ranks' ``rows`` [world_size * n]: [number of parts, n].
        May use the memory of ``received``."""
        if self.world_size == 1:
            return rows.view(1, -1)
        if self._sum_locally:
            dist.all_to_all_single(received[: len(rows)], rows, group=group)
            return received[: len(rows)].view(self.world_size, -1)
        _reduce_scatter(received, rows, group=group)
        return received.view(1, -1)

    def synchronize(self) -> None:
        """The host waits until what the computation waits for is done: gradients are in host memory."""
        if self._on_streams:
            torch.cuda.current_stream(self.device).synchronize()

    def synchronize_gathers(self) -> None:
        """The host waits for all gathers so far, so that it may overwrite shards in host memory."""
        if self._on_streams and self._lanes is not None:
            self._lanes["all_gather"][0].synchronize()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over the ranks of the sharding group, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of each element of ``tensor`` over the ranks of the sharding group, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.process_group)
        return tensor

    def _lane(self, kind: str) -> tuple:
        if self._lanes is None:
            self._lanes = {kind: self._make_lane(kind) for kind in ("all_gather", "reduce_scatter")}
            if self.replicas > 1:
                self._lanes["replicate"] = (None, self._new_group(self.replicate_group), None)
        return self._lanes[kind]

    def _make_lane(self, kind: str) -> tuple:
        """(lane, communicator of the payload, communicator of the check)."""
        if self._on_streams:
            group = self._new_group(self.process_group) if self.world_size > 1 else None
            check = self._new_group(self.process_group, backend="gloo") if self.world_size > 1 else None
            return _StreamLane(self.device), group, check
        group = self._new_group(self.process_group) if self.world_size > 1 else None
        return _ThreadLane(f"moe_zero {kind}"), group, group

    def _new_group(self, of: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
        return dist.new_group(
            dist.get_process_group_ranks(of),
            backend=backend or dist.get_backend(of),
            timeout=self._timeout or _timeout_of(of),
            use_local_synchronization=True,
        )

    def _check(self, group: dist.ProcessGroup | None, kind: str, layer: int) -> None:
        if group is None:
            return
        theirs = torch.empty(self.world_size, dtype=torch.int64)
        _all_gather(theirs, torch.tensor([layer]), group=group)
        named = [self._layers[i] for i in theirs.tolist()]
        if any(name != named[self.rank] for name in named):
            ranks = ", ".join(f"rank {rank} layer {name!r}" for rank, name in enumerate(named))
            raise RanksDisagree(
                f"the ranks disagree on the next {kind}: {ranks}. Every rank must run the same layers in the same "
                "order; a layer that has nothing to do on a rank must still be called there"
            )


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """What ``init_process_group`` or ``new_group`` was given; a group made without a time-out would get PyTorch's
    own."""
    devices = group._device_types
    options = getattr(group._get_backend(devices[0]), "options", None) if devices else None
    return getattr(options, "_timeout", None)


def _difference(first: object, first_rank: int, second: object, second_rank: int) -> str:
    """Names the first entry in which two fingerprints differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            if first.get(key) != second.get(key):
                inner = _difference(first.get(key), first_rank, second.get(key), second_rank)
                return f"{key}: {inner}"
    return f"{first!r} on rank {first_rank}, {second!r} on rank {second_rank}"
