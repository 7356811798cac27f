"""Real processes over gloo, started once for each world size and shared by all tests of this folder."""

import inspect
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

START_SECONDS = 120  # importing torch in several processes on two busy cores


class Ranks:
    """Processes that form one gloo process group (none at all for world size 0)."""

    def __init__(self, world_size: int, timeout: float = 60):
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._connections, self.processes = [], []
        for rank in range(max(world_size, 1)):
            ours, theirs = socket.socketpair()
            command = [
                sys.executable,
                str(Path(__file__).with_name("rank_process.py")),
                str(theirs.fileno()),
                str(rank),
            ]
            command += [str(world_size), os.path.join(self._folder.name, "rendezvous"), str(timeout)]
            # Hash seeds that differ between ranks: no order may come from a set.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(rank + 1)}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            self._connections.append(Connection(ours.detach()))
        self._receive(START_SECONDS, "start")

    def start(self, function: Callable, *args) -> None:
        """Has all ranks begin ``function(*args)``; nobody waits for the result."""
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((inspect.getfile(function), function.__name__, args)))

    def __call__(self, function: Callable, *args, seconds: float = 90) -> list:
        """Runs ``function(*args)`` on all ranks at once; what each returned. Its failure is this test's."""
        self.start(function, *args)
        answers = self._receive(seconds, function.__name__)
        failures = [f"--- rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failures:
            self.stop()  # collectives may be left half-way
            pytest.fail("\n".join(failures), pytrace=False)
        return [answer[1] for answer in answers]

    def _receive(self, seconds: float, what: str) -> list:
        deadline = time.monotonic() + seconds
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {seconds} s")
                answers.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, OSError) as error:
                self.stop()
                pytest.fail(f"{what}: rank {rank} of {self.world_size}: {type(error).__name__} {error}", pytrace=False)
        return answers

    def answer(self, rank: int, seconds: float) -> tuple[bool, object]:
        """What ``start`` led to on one rank: whether it succeeded, and its result or traceback."""
        if not self._connections[rank].poll(seconds):
            raise TimeoutError(f"no answer of rank {rank} within {seconds} s")
        return pickle.loads(self._connections[rank].recv_bytes())

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []
        self._folder.cleanup()


@pytest.fixture(scope="session")
def _pools():
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def on_ranks(_pools) -> Callable:
    """``on_ranks(world_size, function, *args)``: runs a function of the test's file on as many processes; their
    results.
    World size 0: one process without a process group."""

    def run(world_size: int, function: Callable, *args, seconds: float = 90) -> list:
        pool = _pools.get(world_size)
        if pool is None or not pool.alive:
            pool = _pools[world_size] = Ranks(world_size)
        return pool(function, *args, seconds=seconds)

    return run


@pytest.fixture
def fresh_ranks():
    """``fresh_ranks(world_size, timeout)``: processes of their own, for tests that kill some."""
    started = []

    def start(world_size: int, timeout: float) -> Ranks:
        started.append(Ranks(world_size, timeout))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()
