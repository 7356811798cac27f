"""What tests of several folders need."""

import signal
from pathlib import Path

import pytest
import torch

# A shell that starts the tests in the background makes them ignore Ctrl-C, and their child processes with them, which
# the tests of interrupted training are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden_directory() -> Path:
    """The golden files that the project ships."""
    return GOLDEN
