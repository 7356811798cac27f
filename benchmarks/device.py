"""The device that the suites measure on."""

import ctypes
import re
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from moe_zero.doctor import cpu_multiplies_bf16

STATUS = Path("/proc/self/status")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
waits = True
"""False where CUDA events time the work: a host that waits would add its own idle time, and cannot be captured."""


def multiplies_bf16() -> bool:
    """Whether a whole model in bf16 is worth measuring: without instructions for it, products take eight times as long
    as fp32 ones."""
    return DEVICE == "cuda" or cpu_multiplies_bf16()


def synchronize() -> None:
    """Wait for what was launched on a GPU, so that the host's clock measures it."""
    if waits and DEVICE == "cuda":
        torch.cuda.synchronize()


def forward(run: Callable, *arguments):
    """The result of ``run``, without a graph for backward."""
    with torch.no_grad():
        out = run(*arguments)
    synchronize()
    return out


def forward_backward(run: Callable, *arguments) -> None:
    """``run`` and the gradients of its arguments: leaves, or lists of leaves."""
    for argument in arguments:
        for leaf in argument if isinstance(argument, list) else [argument]:
            leaf.grad = None
    run(*arguments).float().square().mean().backward()
    synchronize()


def expert_parameters(experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Weights and biases of all experts' two products, stacked."""
    shapes = ((experts, width, hidden), (experts, width), (experts, hidden, width), (experts, hidden))
    return [(torch.randn(s, device=DEVICE) * s[-1] ** -0.5).to(dtype).requires_grad_() for s in shapes]


def peak_mib() -> float:
    """The most memory that this process has had resident, in MiB.

    On Linux not from ``getrusage``, whose figure a new process inherits from the one that started it.
    """
    if STATUS.exists():
        return _resident("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_above(work: Callable[[], object]) -> float:
    """The most memory that ``work`` has resident at a time beyond what is resident before it, in MiB (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(what: str) -> float:
    return int(re.search(rf"{what}:\s+(\d+) kB", STATUS.read_text())[1]) / 1024
