"""What tests of several folders need."""

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden_directory() -> Path:
    """The golden files that the project ships."""
    return GOLDEN
