"""Every kernel in every configuration, compiled ahead of time for each compute capability."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the kernels can be neither interpreted nor compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process and cannot be compiled", allow_module_level=True)

from moe_zero.triton_kernels import gate
from moe_zero.triton_kernels.resources import SHARED_MEMORY_LIMIT, compile_launch, record

CAPABILITIES = sorted(SHARED_MEMORY_LIMIT)
MATRIX_INSTRUCTIONS = {"wgmma", "tcgen05", "mma.sync"}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(capability, run):
    """(launch, resources) of each kernel that ``run`` launches."""
    with record(capability) as launches:
        run()
    assert launches
    for launch in {launch.key: launch for launch in launches}.values():
        yield launch, compile_launch(launch, capability)


def assert_fits(capability, launch, resources):
    assert resources.stack_bytes == 0, f"{launch.key} spills {resources.stack_bytes} bytes"
    assert resources.shared_bytes <= SHARED_MEMORY_LIMIT[capability], launch.key


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("E", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "Q"), [(1000, 1), (65536, 1), (64, 32)])
def test_gate(capability, E, dtype, T, Q):
    if dtype == torch.float32 and T > 1000:
        pytest.skip("fp32 has one configuration for any number of tokens")

    def run():
        x, router = meta(T, Q, 768, dtype=dtype), meta(E, 768, dtype=dtype)
        weights, ids, probs, _, importance, logsumexp = gate.gate_forward(x, router, 2, True)
        gate.gate_backward(weights, probs, importance, logsumexp, x, router, ids, probs, True)

    for launch, resources in compiled(capability, run):
        assert_fits(capability, launch, resources)
        if dtype == torch.bfloat16 and Q == 1:
            assert MATRIX_INSTRUCTIONS & set(resources.matrix_instructions), launch.key
