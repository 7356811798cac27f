"""The processes of a run."""

import os
import subprocess
import sys

import pytest

MEETS = """
import os
import torch.distributed as dist
from moe_zero.recipes.processes import joined

with joined("cpu") as processes:
    group = dist.new_group([0, 1])
    dist.barrier(group)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and processes.rank == 1:
        os._exit(3)
    dist.barrier(group)
    print("met again", flush=True)
"""


@pytest.mark.distributed
def test_processes_that_torchrun_restarts_find_each_other(tmp_path):
    (tmp_path / "meets.py").write_text(MEETS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "--monitor-interval=0.2", str(tmp_path / "meets.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met again") == 2
