"""Every kernel in every configuration, compiled ahead of time for each compute capability."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the kernels can be neither interpreted nor compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process and cannot be compiled", allow_module_level=True)

from moe_zero.triton_kernels import beam, combine, ffn, gate
from moe_zero.triton_kernels.resources import SHARED_MEMORY_LIMIT, compile_launch, ptx, record

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


def assert_matrix_instruction(capability, launch, resources):
    """16-bit products use the tensor cores, by the generation's own instruction where a tile has 64 rows or more."""
    low_precision = launch.signature["a_ptr"] != "*fp32"
    if not low_precision:
        return
    own = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma.sync")
    wanted = own if launch.constexprs["BLOCK_M"] >= 64 else "mma.sync"
    assert wanted in resources.matrix_instructions, (launch.key, resources.matrix_instructions)


def ffn_inputs(rows_per_expert, dtype, *, E=8, K=2, D=768, F=3072, separate=False):
    T = rows_per_expert * E // K
    x, weights = meta(T, D, dtype=dtype), meta(T, K)
    ids = meta(T, K, dtype=torch.int64)
    shapes = ((F, D), (F,), (D, F), (D,))
    copies, stack = (E, ()) if separate else (1, (E,))
    params = [[meta(*stack, *shape, dtype=dtype) for _ in range(copies)] for shape in shapes]
    return x, ids, weights, params


def run_ffn(x, ids, weights, params, *, recompute=False):
    y, pre, order, offsets = ffn.gelu_ffn_forward(x, ids, weights, *params, False, not recompute)
    dense, K = ids is None, 1 if ids is None else ids.shape[1]
    needs = [True, weights is not None, *[True] * 4]
    ffn.gelu_ffn_backward(y, x, weights, *params, pre, order, offsets, dense, K, False, not recompute, needs)


def check_products(capability, run):
    for launch, resources in compiled(capability, run):
        assert_fits(capability, launch, resources)
        if launch.name in ("product_kernel", "weight_gradient_kernel"):
            assert_matrix_instruction(capability, launch, resources)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows_per_expert", [16, 32, 128, 512, 8192])
def test_ffn_in_16_bits(capability, rows_per_expert):
    check_products(capability, lambda: run_ffn(*ffn_inputs(rows_per_expert, torch.bfloat16)))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows_per_expert", [32, 8192])
def test_ffn_in_fp32(capability, rows_per_expert):
    check_products(capability, lambda: run_ffn(*ffn_inputs(rows_per_expert, torch.float32)))


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("form", ["fp16", "dense", "separate", "recompute", "odd sizes"])
def test_other_forms_of_ffn(capability, form):
    dtype = torch.float16 if form == "fp16" else torch.bfloat16
    sizes = {"D": 769, "F": 3071} if form == "odd sizes" else {}
    x, ids, weights, params = ffn_inputs(1024, dtype, separate=form == "separate", **sizes)
    if form == "dense":
        ids = weights = None
    check_products(capability, lambda: run_ffn(x, ids, weights, params, recompute=form == "recompute"))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_post_route(capability):
    def run():
        E, G, Q, D, F, S = 8, 64, 32, 768, 3072, 128
        _, _, _, (w1, b1, w2, b2) = ffn_inputs(16, torch.bfloat16)
        x, folded, needs = meta(G * Q, D, dtype=torch.bfloat16), meta(E, F), [True] * 4
        logits, pre = ffn.post_route_up(x, Q, w1, b1, folded, False)
        pre_EGQF, weights = pre.view(E, G, Q, F), meta(S)
        pairs = [meta(S, dtype=torch.int64) for _ in range(2)]
        y = ffn.post_route_down(pre_EGQF, *pairs, weights, w2, b2, False)
        ffn.post_route_down_backward(y, pre_EGQF, *pairs, weights, w2, b2, False, needs)
        ffn.post_route_up_backward(logits, pre, x, Q, w1, folded, pre, False, needs)

    check_products(capability, run)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("T", "D"), [(64, 768), (4096, 384), (4096, 768), (4096, 4096), (4096, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_combine(capability, T, D, dtype):
    def run():
        y, residual = meta(T, 2, D, dtype=dtype), meta(T, D, dtype=dtype)
        weights, gain, bias = meta(T, 2), meta(D), meta(D)
        out, mean, rstd = combine.combine_forward(y, weights, residual, gain, bias, 1e-12, dtype)
        combine.combine_backward(out, y, weights, residual, gain, mean, rstd, (y, weights, residual, gain, bias))

    for launch, resources in compiled(capability, run):
        assert_fits(capability, launch, resources)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("K", [1, 2, 3, 8])
@pytest.mark.parametrize("with_residual", [False, True])
def test_combine_backward_of_the_widest_rows(capability, K, with_residual):
    T, D = 4096, 8192

    def run():
        y, weights, rows, gain, stats = meta(T, K, D), meta(T, K), meta(T, D), meta(D), meta(T)
        residual, grad_residual = (rows, rows) if with_residual else (None, meta(0))
        grads = (y, weights, grad_residual, gain, gain)
        combine.combine_backward(rows, y, weights, residual, gain, stats, stats, grads)

    for launch, resources in compiled(capability, run):
        assert_fits(capability, launch, resources)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("J", "R", "k"), [(2, 2, 2), (7, 7, 7), (31, 255, 31)])
def test_beam_step(capability, J, R, k):
    def run():
        ids = meta(16, J, 5, dtype=torch.int64)
        beam.beam_step(None, meta(16, R), k, None)
        beam.beam_step(meta(16, J), meta(16 * J, R), k, ids)

    for launch, resources in compiled(capability, run):
        assert_fits(capability, launch, resources)


def test_expert_index_out_of_range_is_asserted_on_the_device():
    with record(80) as launches:
        ffn.sort_by_expert(meta(1000, dtype=torch.int64), 8)
    assert "__assertfail" in ptx(launches[0], 80)
