"""The CUDA kernels' indexing, run on the host block by block and thread by thread, against the eager reference."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_zero.ops.flat import (
    FlatPlan,
    pack_reference,
    sum_rows_reference,
    unpack_reference,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "tests/csrc/tiles_on_host.cpp", ROOT / "csrc/tensor_view.cpp", ROOT / "csrc/flat_plan.cpp"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LARGE = 4060  # words of one launch, as in csrc/cuda/flat_cuda.cu


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not SOURCES[-1].exists():
        pytest.skip("needs a C++ compiler and the sources")
    library = tmp_path_factory.mktemp("tiles") / "tiles.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-Wextra"]
    flags += ["-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan"]
    command = [compiler, *flags, f"-I{ROOT / 'csrc'}", *map(str, SOURCES), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    loaded.tiles_pack.restype = loaded.tiles_unpack.restype = ctypes.c_int64
    return loaded


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def call(function, plan, tensors, capacity, *rest):
    table = plan.table
    tile_words = torch.frombuffer(plan._layout.tiles(), dtype=torch.int64)
    ndims = [-1 if t is None else t.dim() for t in tensors]
    geometry = [n for t in tensors if t is not None for n in (*t.shape, *t.stride())]
    return function(
        pointer(table),
        ctypes.c_int64(table.numel()),
        pointer(tile_words),
        ctypes.c_int64(tile_words.numel()),
        ctypes.c_int64(len(tensors)),
        (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors)),
        (ctypes.c_int32 * len(tensors))(*(0 if t is None else DTYPES.index(t.dtype) for t in tensors)),
        (ctypes.c_int32 * len(tensors))(*ndims),
        (ctypes.c_int64 * len(geometry))(*geometry),
        ctypes.c_int64(capacity),
        *rest,
    )


def odd_tensors(dtype):
    """Dense, misaligned, transposed, sliced, expanded, empty, scalar, absent, and one that spans several tiles."""
    base = torch.randn(64).to(dtype)
    return [
        torch.randn(13, 5).to(dtype),
        base[3:20],
        torch.randn(7, 9).to(dtype).t(),
        torch.randn(6, 10, 4).to(dtype)[1:5, ::3, 1:],
        torch.randn(5, 1).to(dtype).expand(5, 8),
        torch.empty(0, 3, dtype=dtype),
        torch.randn(()).to(dtype),
        None,
        torch.randn(5, 3001).to(dtype),
    ]


def plan_for(tensors, flat_dtype, world_size):
    sizes = [11 if t is None else t.numel() for t in tensors]
    trainable = [i % 3 != 0 for i in range(len(tensors))]
    return FlatPlan(sizes, [flat_dtype] * len(tensors), trainable, world_size)


@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_pack_kernel_equals_reference(tiles, dtype, flat_dtype, world_size):
    tensors = odd_tensors(dtype)
    plan = plan_for(tensors, flat_dtype, world_size)
    for scale in (1.0, 0.3):
        flat = torch.full((plan.flat_bytes,), 255, dtype=torch.uint8)
        stats, expected = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        launches = call(tiles.tiles_pack, plan, tensors, LARGE, pointer(flat), ctypes.c_double(scale), pointer(stats))
        reference = pack_reference(tensors, plan, torch.empty_like(flat), scale=scale, stats=expected)
        assert launches == 1
        assert torch.equal(flat, reference)
        torch.testing.assert_close(stats, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("flat_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_unpack_kernel_equals_reference(tiles, dtype, flat_dtype, accumulate):
    tensors = [t for t in odd_tensors(dtype) if t is not None and 0 not in t.stride()]
    plan = plan_for(tensors, flat_dtype, 3)
    flat = pack_reference([torch.randn(t.shape) for t in tensors], plan)
    expected = [t.clone(memory_format=torch.preserve_format) for t in tensors]
    unpack_reference(flat, plan, expected, accumulate=accumulate)
    call(tiles.tiles_unpack, plan, tensors, LARGE, pointer(flat), ctypes.c_int32(accumulate))
    assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))


def test_thousands_of_tensors_take_one_launch_and_more_than_fit_take_several(tiles):
    tensors = [torch.randn(1 + i % 7) for i in range(4000)]
    plan = plan_for(tensors, torch.float32, 2)
    expected = pack_reference(tensors, plan)
    for capacity, launches in ((LARGE, 1), (1500, 3)):
        flat, stats = torch.full_like(expected, 7), torch.zeros(2, dtype=torch.float64)
        taken = call(tiles.tiles_pack, plan, tensors, capacity, pointer(flat), ctypes.c_double(1), pointer(stats))
        assert taken == launches
        assert torch.equal(flat, expected)
        targets = [torch.zeros_like(t) for t in tensors]
        assert call(tiles.tiles_unpack, plan, targets, capacity, pointer(flat), ctypes.c_int32(0)) == launches
        assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=True))


@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_rows_kernel_equals_reference(tiles, accumulate):
    rows, out = torch.randn(5, 9001), torch.randn(9001)
    stats, expected_stats, expected = torch.zeros(2).double(), torch.zeros(2).double(), out.clone()
    tiles.tiles_sum_rows(
        pointer(rows),
        ctypes.c_int64(5),
        ctypes.c_int64(9001),
        pointer(out),
        ctypes.c_double(0.2),
        accumulate,
        pointer(stats),
    )
    sum_rows_reference(rows, expected, scale=0.2, accumulate=accumulate, stats=expected_stats)
    assert torch.equal(out, expected)
    torch.testing.assert_close(stats, expected_stats, rtol=1e-12, atol=0)
