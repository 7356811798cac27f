"""Fixtures of the operators' tests."""

import pytest
import torch

from moe_zero import _extensions


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(params=["plain", "avx2", "avx512"])
def kernels(request):
    """Runs a test with each instruction set that this processor has."""
    try:
        _extensions.ops_cpu.kernels(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    _extensions.ops_cpu.kernels("auto")
