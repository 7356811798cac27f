"""The device that the suites measure on."""

import re
import resource
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
waits = True
"""False where CUDA events time the work: a host that waits would add its own idle time, and cannot be captured."""


def synchronize() -> None:
    """Wait for what was launched on a GPU, so that the host's clock measures it."""
    if waits and DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_mib() -> float:
    """The most memory that this process has had resident, in MiB.

    On Linux not from ``getrusage``, whose figure a new process inherits from the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
