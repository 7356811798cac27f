"""Run the tests in ``interpreted/`` under Triton's interpreter, one process per module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernels can be neither interpreted nor compiled")

MODULES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem.removeprefix("test_"))
def test_kernels_under_the_interpreter(module):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("already under the interpreter: the modules in interpreted/ are collected directly")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(module)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
