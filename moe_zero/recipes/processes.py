"""The processes of a run: started by torch.distributed's own launcher, or already started by torchrun, or just this
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.14 renamed it: the former name warns there, the new one does not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

INTERRUPTED = 130
"""Exit code of a run that a signal ended, as shells have it for Ctrl-C."""


class WorkerError(RuntimeError):
    """A process of a run failed; the message is its own, with the rank in front."""


@dataclass(frozen=True)
class Processes:
    """What one process knows of the others. With ``world_size`` 1 no collective is ever run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes, elementwise."""
        if self.world_size > 1:
            dist.all_reduce(values)
            values = values / self.world_size
        return values

    def any(self, condition: bool) -> bool:
        """Whether it holds at any process; the same answer at all."""
        return bool(self.mean(torch.tensor(float(condition), device=self.device)) > 0)

    def concatenated(self, rows: Tensor) -> Tensor:
        """Rows of all processes, which have the same number, in the order of ranks."""
        if self.world_size == 1:
            return rows
        out = rows.new_empty(rows.shape[0] * self.world_size, *rows.shape[1:])
        _all_gather(out, rows.contiguous())
        return out


def launched_from_outside() -> bool:
    """Whether torchrun (or another launcher that sets its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(device: str = "auto", threads: int = 0) -> Iterator[Processes]:
    """This process among the others, with the default process group while there are others.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU for each local process where there is one.
        threads: CPU threads; 0 gives each local process its share of the cores it may run on.

    Raises:
        ValueError: ``device`` is ``"cuda"`` and there are fewer GPUs than local processes.
    """
    if launched_from_outside():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    else:
        rank, world_size, local_rank, local_world_size = 0, 1, 0, 1
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < local_world_size:
        raise ValueError(
            f"device is 'cuda', but there are {gpus} GPUs for {local_world_size} processes on this machine"
        )
    place = torch.device("cuda", local_rank) if gpus >= local_world_size else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_world_size))
    if world_size > 1:
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            device_id=place if place.type == "cuda" else None,
            **_meeting_place(rank, world_size),
        )
    try:
        yield Processes(rank, world_size, local_rank, local_world_size, place)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meeting_place(rank: int, world_size: int) -> dict[str, Any]:
    """Arguments of init_process_group, when torchrun has restarted the processes: it keeps its store, in which they
    would find the addresses of the dead (https://github.com/pytorch/pytorch/issues/135712)."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False)
    return {"store": dist.PrefixStore(f"restart-{restarts}", store), "rank": rank, "world_size": world_size}


def launch(function: Callable[..., Any], nproc: int, *arguments: Any) -> Any:
    """Run ``function(*arguments)`` in ``nproc`` processes and return what rank 0 returned.

    With one process, or under torchrun, it is called here. ``function`` and its arguments are pickled otherwise.

    Raises:
        WorkerError: a process failed.
        KeyboardInterrupt: the run was interrupted (Ctrl-C or a signal); the processes had time to end in their way.
    """
    if nproc == 1 or launched_from_outside():
        return function(*arguments)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Blocks from 32 MiB on (a layer, its gradients) are mapped, and unmapped when they are freed; the rest of the heap
    # is trimmed. By default glibc adapts both limits until freed memory rarely goes back. In its first steps the
    # default run held 2.06 GiB, against 2.35 without; from 2 MiB on it held 1.71, and took a tenth longer.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    # A checkpoint may take longer than the half minute that the launcher gives its processes on a signal.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id=uuid.uuid4().hex,
        max_restarts=0,
    )
    try:
        return elastic_launch(settings, _recorded)(function, *arguments)[0]
    except SignalException as error:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(error.sigval).name}") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == INTERRUPTED:
            raise KeyboardInterrupt("stopped by a signal") from None
        raise WorkerError(f"process {rank} failed: {_last_line(failure.message)}") from None


def _recorded(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the process: let its exception, with traceback, reach the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        return record(function)(*arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _last_line(message: Any) -> str:
    text = message.get("message", str(message)) if isinstance(message, dict) else str(message)
    return text.strip().splitlines()[-1] if text.strip() else "without a message"


class StopSignal:
    """Remembers SIGINT and SIGTERM while it is entered, so that a step is finished before anything stops."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self.received = True


def return_freed_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the operating system.

    glibc keeps it, scattered over the threads that freed it (autograd's, the collectives'): a run of two processes grew
    by 50 MiB a step. The next step has to ask for it again, about 5 % of its time, so not every step should do this.
    """
    if device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory_mib(device: torch.device) -> float:
    """Most memory this process has held so far: resident on the CPU, allocated on a GPU.

    Read from /proc where there is one: ``getrusage`` also counts what the parent held before this program was loaded.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 2**10
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
