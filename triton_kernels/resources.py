"""What each kernel needs of a GPU, found out without one.

A launcher is run on meta tensors while its launches are recorded instead of started; each is then compiled ahead of
time for a compute capability, with the specialisations that a real launch would have, and its machine code inspected.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from . import tuning

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one program may use, by compute capability."""

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_MATRIX_INSTRUCTIONS = {"wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma.sync": r"\bmma\.sync"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the compiler sees it."""

    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int], list]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        return repr((self.name, self.signature, sorted(self.constexprs.items(), key=str), self.attrs, self.options))


@dataclass(frozen=True)
class Resources:
    """What the compiled code of a launch uses."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    matrix_instructions: tuple[str, ...]


@contextmanager
def record(capability: int) -> Iterator[list[Launch]]:
    """Collect, without starting them, the launches made inside the block as if on a GPU of ``capability`` (90: 9.0)."""
    launches: list[Launch] = []

    def run(self, *args, grid, warmup, **kwargs):
        launches.append(_describe(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(tuning, "capability", lambda _: capability):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for ``capability`` and read registers, stack, shared memory and matrix instructions off the result."""
    compiled = _compile(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    instructions = tuple(
        name for name, pattern in _MATRIX_INSTRUCTIONS.items() if re.search(pattern, compiled.asm["ptx"])
    )
    return Resources(found["REG"], found["STACK"], compiled.metadata.shared, instructions)


def ptx(launch: Launch, capability: int) -> str:
    """The launch's code for ``capability``, in the form that the driver's assembler takes."""
    return _compile(launch, capability).asm["ptx"]


def _compile(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def _describe(kernel: JITFunction, args: tuple, kwargs: dict) -> Launch:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "debug") if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constexprs, attrs = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (_is_one(value) and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constexprs[param.name] = value
        elif isinstance(value, tuple):
            signature[param.name] = tuple("*" + _TYPES[tensor.dtype] for tensor in value)
            attrs |= {(index, i): [["tt.divisibility", 16]] for i in range(len(value))}
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(index,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constexprs, attrs, options)


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1
