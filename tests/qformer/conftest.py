"""Scripts that several processes run, for the Q-Former's tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def results_of_ranks(tmp_path) -> Callable:
    """``results_of_ranks(script, ranks)``: what a script, started by torchrun, wrote to the file that it was given."""

    def run(script: Path, ranks: int) -> object:
        file = tmp_path / "results.pt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run([*launcher, str(script), str(file)], check=True, timeout=120, env=environment)
        return torch.load(file)

    return run
