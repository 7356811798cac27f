"""What the registration of every operator needs: checks of arguments, dtypes, and the kernels where Triton is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def triton_kernels(module: str) -> ModuleType:
    """The kernels of one operator, imported on first use so that ``import moe_zero`` needs no Triton."""
    try:
        return importlib.import_module(f"moe_zero.triton_kernels.{module}")
    except ImportError as error:
        raise RuntimeError(
            f"moe_zero.ops.{module} on CUDA tensors needs Triton, which cannot be imported ({error}); "
            "install it with `pip install triton`, or move the tensors to the CPU"
        ) from error


def check_float(**tensors: Tensor | None) -> None:
    """Raise ``TypeError`` for a tensor of another dtype than fp64 (CPU only), fp32, bf16 and fp16."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be float32, bfloat16, float16 or float64")
        if tensor.dtype == torch.float64 and tensor.is_cuda:
            raise TypeError(
                f"{name} is float64 on {tensor.device}; the CUDA kernels take float32, bfloat16 and float16"
            )


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless all tensors are on the device of the first."""
    (first, reference), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, but {first} is on {reference.device}")


def accumulate_dtype(*tensors: Tensor) -> torch.dtype:
    """fp32, or fp64 where a tensor is fp64."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def promote(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Convert the tensors to the dtype that all promote to, as an arithmetic expression of them would."""
    dtypes = {tensor.dtype for tensors in lists for tensor in tensors}
    if len(dtypes) == 1:
        return [list(tensors) for tensors in lists]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [[tensor.to(dtype) for tensor in tensors] for tensors in lists]


_LIBRARY = torch.library.Library("moe_zero", "FRAGMENT")


def register_autocast(op: torch.library.CustomOpDef, *, cast: Sequence[int] = ()) -> None:
    """Run an operator with autocast off, so that nothing inside of it is rounded behind its back.

    The arguments at the positions ``cast`` (tensors or lists of them) are converted to autocast's dtype first, fp64
    excepted; the others are taken as they are. torch's own ``register_autocast`` converts all, to one fixed dtype.
    """
    name = op._qualname.removeprefix("moe_zero::")
    for device in ("cpu", "cuda"):

        def kernel(*args, device=device):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return op(*(_cast(arg, dtype) if index in cast else arg for index, arg in enumerate(args)))

        _LIBRARY.impl(name, kernel, f"Autocast{device.upper()}")


def _cast(value: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return value if value.dtype == torch.float64 else value.to(dtype)
    return [_cast(tensor, dtype) for tensor in value]
