"""Flat buffers on a GPU: their share of the device-to-device copy rate, and the number of launches.

python benchmarks/gpu_flat.py
"""

import torch

from moe_zero.ops.flat import FlatPlan, pack, unpack

# A full-size Q-Former layer: self- and cross-attention, text FFN and three experts, LayerNorms.
LAYER = [768 * 768, 768] * 4 + [768 * 768, 768, 768 * 1408, 768, 768 * 1408, 768, 768 * 768] + [768] * 11
LAYER += [3072 * 768, 3072, 768 * 3072, 768] * 4


def seconds(function, repeats=50):
    """Median time of a call on the GPU, after a warm-up, with the L2 cache overwritten before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(repeats + 5):
        flush.fill_(i % 7)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return torch.tensor(times[5:]).median().item()


def launches(function):
    """Kernels that one call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum("kernel" in event.name for event in profile.events())


def report(sizes, tensor_dtype, flat_dtype):
    """For pack and unpack of one set of tensors: bytes moved per second, the share of a plain copy's, launches."""
    tensors = [torch.randn(size, device="cuda").to(tensor_dtype) for size in sizes]
    plan = FlatPlan(sizes, [flat_dtype] * len(sizes), [True] * len(sizes), 4)
    flat = pack(tensors, plan)
    moved = sum(sizes) * (tensor_dtype.itemsize + flat_dtype.itemsize)
    source = torch.randint(255, (moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_rate = moved / seconds(lambda: target.copy_(source))
    for name, function in (
        ("pack", lambda: pack(tensors, plan, flat)),
        ("unpack", lambda: unpack(flat, plan, tensors)),
    ):
        rate = moved / seconds(function)
        yield {
            "operator": name,
            "tensors": len(sizes),
            "dtypes": f"{tensor_dtype} <-> {flat_dtype}".replace("torch.", ""),
            "GB/s": rate / 1e9,
            "share of copy": rate / copy_rate,
            "launches": launches(function),
        }


def main():
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(torch.cuda.get_device_name())
    for sizes in (LAYER, [768] * 2000):
        for dtypes in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
        ):
            for row in report(sizes, *dtypes):
                print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
