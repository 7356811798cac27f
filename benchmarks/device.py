"""The device that the suites measure on."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
waits = True
"""False where CUDA events time the work: a host that waits would add its own idle time, and cannot be captured."""


def synchronize() -> None:
    """Wait for what was launched on a GPU, so that the host's clock measures it."""
    if waits and DEVICE == "cuda":
        torch.cuda.synchronize()
