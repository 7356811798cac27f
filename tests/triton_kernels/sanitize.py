"""Runs the tests in ``interpreted/`` while every address that a Triton kernel touches is checked.

    PYTHON=.venv/bin/python bash tests/triton_kernels/sanitize.sh [options of pytest]

It hooks into Triton's interpreter by way of triton-viz. That package's own sanitizer follows a kernel symbolically: it
cannot follow one that finds a tile's expert in the data, and takes all ranges of one length for one variable. The one
here looks at the addresses themselves, in every program of every launch:

- each pointer carries the number of the argument that it was made from in its 16 highest bits, so that an access beyond
  a tensor's end is one even where another tensor follows in memory;
- two programs of a launch must not write one element, nor one read what another writes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_viz
import triton_viz.wrapper
from triton.runtime.interpreter import TensorHandle
from triton_viz.core.callbacks import ForLoopCallbacks, OpCallbacks
from triton_viz.core.client import Client
from triton_viz.core.data import Load, Store
from triton_viz.frontends.base import OPERATION_REGISTRY

TAG_SHIFT = np.uint64(48)
ADDRESS_BITS = (np.uint64(1) << TAG_SHIFT) - np.uint64(1)


class IllegalAccess(Exception):
    """A kernel read or wrote where it must not."""


class AddressSanitizer(Client):
    """Raises :class:`IllegalAccess` at the first fault of a launch."""

    NAME = "address sanitizer"
    launches: ClassVar[dict[str, int]] = {}
    """How many launches of each kernel were checked."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.program = kernel, (0, 0, 0)
        self._forget()

    def _forget(self) -> None:
        self.arguments: list[tuple[str, torch.Tensor]] = []
        self.accesses: dict[type, list[tuple[np.ndarray, tuple]]] = {Load: [], Store: []}

    def _fault(self, message: str) -> NoReturn:
        self._forget()
        raise IllegalAccess(f"{self.kernel}: {message}")

    def arg_callback(self, name, arg, arg_cvt) -> None:
        if isinstance(arg, tuple):
            for i, pair in enumerate(zip(arg, arg_cvt, strict=True)):
                self.arg_callback(f"{name}[{i}]", *pair)
        elif isinstance(arg, torch.Tensor):
            arg_cvt.handle.data = arg_cvt.handle.data | (np.uint64(len(self.arguments)) << TAG_SHIFT)
            self.arguments.append((name, arg))

    def grid_idx_callback(self, grid_idx) -> None:
        self.program = grid_idx

    def register_op_callback(self, op_type, *args, **kwargs) -> OpCallbacks:
        if op_type is Load:
            return OpCallbacks(op_overrider=self._load)
        return OpCallbacks(op_overrider=self._store) if op_type is Store else OpCallbacks()

    def _load(self, ptrs, mask, *rest):
        return _original("create_masked_load")(self._checked(Load, ptrs, mask), mask, *rest)

    def _store(self, ptrs, value, mask, *rest):
        return _original("create_masked_store")(self._checked(Store, ptrs, mask), value, mask, *rest)

    def _checked(self, kind: type, ptrs: TensorHandle, mask: TensorHandle) -> TensorHandle:
        """The pointers without their tags, if all that the mask lets through are inside of their arguments."""
        tagged = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
        for tag in np.unique(tagged >> TAG_SHIFT):
            name, tensor = self.arguments[tag] if tag < len(self.arguments) else ("", None)
            if tensor is None:
                self._fault("a pointer does not come from an argument")
            addresses = tagged[tagged >> TAG_SHIFT == tag] & ADDRESS_BITS
            offsets = addresses.astype(np.int64) - tensor.data_ptr()
            outside = (offsets < 0) | (offsets > _extent(tensor) - tensor.element_size())
            if outside.any():
                self._fault(
                    f"program {self.program} {_verb(kind)} {name} of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()} at byte {offsets[outside][0]}; it has {_extent(tensor)} bytes"
                )
            self.accesses[kind].append((np.unique(addresses), self.program))
        return TensorHandle(ptrs.data & ADDRESS_BITS, ptrs.dtype)

    def post_run_callback(self, fn) -> bool:
        return True

    def finalize(self) -> list:
        """End of a launch: whether its programs kept out of each other's way."""
        writers: dict[int, tuple] = {}
        for kind in (Store, Load):
            for addresses, program in self.accesses[kind]:
                for address in addresses.tolist():
                    writer = writers.setdefault(address, program) if kind is Store else writers.get(address, program)
                    if writer != program:
                        self._fault(f"program {program} {_verb(kind)} an element that program {writer} writes")
        self.launches[self.kernel] = self.launches.get(self.kernel, 0) + 1
        self._forget()
        return []

    def register_for_loop_callback(self) -> ForLoopCallbacks:
        return ForLoopCallbacks()

    def pre_run_callback(self, fn) -> bool:
        return True

    def pre_warmup_callback(self, jit_fn, *args, **kwargs) -> bool:
        return False

    def post_warmup_callback(self, jit_fn, ret) -> None: ...

    def grid_callback(self, grid) -> None: ...


def _original(name: str):
    """An operation of the interpreter as it is without hooks."""
    return OPERATION_REGISTRY["triton"].original_ops[triton.runtime.interpreter.interpreter_builder][name]


def _verb(kind: type) -> str:
    return "reads" if kind is Load else "writes"


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _sanitized(kernel):
    return triton_viz.trace(client=AddressSanitizer(kernel.__name__))(kernel)


def _shift_kernel(x_ptr, out_ptr, readable, writable, shift, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < readable, other=0.0)
    tl.store(out_ptr + n + shift, x, mask=n + shift < writable)
    tl.store(out_ptr + n, x, mask=n < writable)


def check_that_faults_are_found() -> None:
    """The sanitizer has to find what it is for before its silence means anything."""
    shift_kernel = triton.jit(_shift_kernel)
    memory = torch.arange(64.0)
    out, x = memory[:20], memory[20:40]  # neighbours in memory: what leaves out lands in x

    def launch(readable=20, writable=20, shift=0):
        shift_kernel[(3,)](x, out, readable, writable, shift, BLOCK=8)

    launch()
    assert torch.equal(x, out), "a sound kernel gave a wrong result"
    for arguments, message in (
        ({"readable": 21}, "reads x_ptr of shape (20,) and strides (1,) at byte 80"),
        ({"writable": 21}, "writes out_ptr of shape (20,) and strides (1,) at byte 80"),
        ({"shift": -1}, "writes out_ptr of shape (20,) and strides (1,) at byte -4"),
        ({"shift": 1}, "writes an element that program (0, 0, 0) writes"),
    ):
        try:
            launch(**arguments)
        except IllegalAccess as error:
            assert message in str(error), f"expected {message!r}, but got: {error}"
        else:
            raise AssertionError(f"the sanitizer did not notice: {message}")


def main() -> None:
    # triton-viz replaces tl.trans by a function without the interpreter's arguments; nothing here looks at it.
    del OPERATION_REGISTRY["triton"].namespaces[tl]["trans"]
    triton.jit = triton_viz.wrapper.create_patched_jit(_sanitized)
    check_that_faults_are_found()
    tests = str(Path(__file__).parent / "interpreted")
    status = pytest.main([tests, "-q", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[1:]])
    launches = AddressSanitizer.launches
    for kernel in sorted(_kernels()):
        print(f"{launches.get(kernel, 0):6} launches of {kernel}")
    unchecked = [] if sys.argv[1:] else sorted(_kernels() - set(launches))
    sys.exit(status or (f"never launched: {', '.join(unchecked)}" if unchecked else 0))


def _kernels() -> set[str]:
    """Names of the kernels that the package launches."""
    from moe_zero.triton_kernels import beam, combine, ffn, gate

    return {name for module in (beam, combine, ffn, gate) for name in vars(module) if name.endswith("_kernel")}


if __name__ == "__main__":
    main()
