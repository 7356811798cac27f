"""A process of the rank pool in conftest.py: joins a process group, then runs functions of test files that it is
told."""

import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def load(path: str, cache: dict):
    if path not in cache:
        spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
        cache[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cache[path])
    return cache[path]


def reply(connection: Connection, answer: object) -> None:
    # Tensors by value: Connection.send would pass handles of shared memory.
    connection.send_bytes(pickle.dumps(answer))


def main() -> None:
    handle, rank, world_size, rendezvous, timeout = sys.argv[1:]
    connection = Connection(int(handle))
    torch.set_num_threads(1)
    if int(world_size) > 0:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=int(rank),
            world_size=int(world_size),
            timeout=timedelta(seconds=float(timeout)),
        )
    reply(connection, None)
    modules: dict = {}
    while True:
        try:
            path, name, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            reply(connection, (True, getattr(load(path, modules), name)(*args)))
        except BaseException:
            reply(connection, (False, traceback.format_exc()))
    os._exit(0)  # no waiting for collectives that a failed test left behind


if __name__ == "__main__":
    main()
