"""What the registration of every operator needs: checks of arguments, dtypes, and the kernels where Triton is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moe_zero import _extensions

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


def check_tensor(**values: object) -> None:
    """Raise ``TypeError`` for what is no tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {_described(value)}; it must be a tensor")


def check_integer(**values: object) -> None:
    """Raise ``TypeError`` for a number that is no integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name} is {_described(value)}; it must be an integer")


def check_integers(**tensors: Tensor | None) -> None:
    """Raise ``TypeError`` for a tensor of indices that are no integers."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(**{name: tensor})
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"{name} have dtype {tensor.dtype}; they must be integers")


def _described(value: object) -> str:
    """A value in an error message: numbers and short strings as they are, anything else by its type."""
    simple = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if simple else f"a {type(value).__name__}"


def check_float(**tensors: Tensor | None) -> None:
    """Raise ``TypeError`` for a tensor of another dtype than fp64 (CPU only), fp32, bf16 and fp16, or no tensor."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(**{name: tensor})
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


def to_bits(flags: Iterable[bool]) -> int:
    """Flags as one integer, the first in the lowest bit: how operators are told which gradients are needed."""
    return sum(bool(flag) << i for i, flag in enumerate(flags))


def from_bits(bits: int, count: int) -> list[bool]:
    """The ``count`` flags that :func:`to_bits` put together."""
    return [bool(bits >> i & 1) for i in range(count)]


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


class Operator:
    """One operator of the namespace ``moe_zero``; called with the arguments of its schema.

    On the CPU it runs the C++ kernel that the compiled extension registers under the same name, or ``fallback`` where
    there is no extension. ``torch.compile``, autocast, ``torch.func`` and dispatch modes see a ``torch.library``
    operator; plain eager calls take a shorter way to the same kernel and the same backward formula, because the Python
    that torch generates around an operator costs more than a small call itself.

    Args:
        schema: name, arguments and results, as in ``native_functions.yaml``.
        fake: results without data.
        cuda: kernel for CUDA tensors.
        fallback: kernel for CPU tensors, in PyTorch.
        setup_context, backward: as of ``torch.library.register_autograd``; without them, differentiating through the
            operator is an error.
        rows: positions of the arguments that ``fold`` takes a mapped dimension of.
        fold: the operator with one more dimension, the first, in these arguments and all results. ``torch.vmap`` uses
            it where no other argument is mapped, and calls the operator for one index after the other elsewhere.
        lists: whether an argument is a list of tensors that may need gradients. The short way has no place for those.
        cast: positions of the arguments (tensors or lists of them) that autocast converts to its dtype, fp64 excepted.
            The others are taken as they are, and nothing inside of the operator is rounded behind its back.
    """

    def __init__(
        self,
        schema: str,
        *,
        fake: Callable,
        cuda: Callable,
        fallback: Callable,
        setup_context: Callable | None = None,
        backward: Callable | None = None,
        rows: Sequence[int] = (),
        fold: Callable | None = None,
        lists: bool = False,
        cast: Sequence[int] = (),
    ) -> None:
        self.name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._operator = getattr(torch.ops.moe_zero, self.name).default
        torch.library.register_fake(self._operator, fake, lib=_LIBRARY)
        _LIBRARY.impl(self.name, cuda, "CUDA")
        if _extensions.ops_cpu is None:
            _LIBRARY.impl(self.name, fallback, "CPU")
        self._autocast = {device: self._autocast_kernel(device, cast) for device in ("cpu", "cuda")}
        for device, kernel in self._autocast.items():
            _LIBRARY.impl(self.name, kernel, f"Autocast{device.upper()}")
        torch.library.register_autograd(
            self._operator, backward or self._refuse, setup_context=setup_context, lib=_LIBRARY
        )
        self._rows, self._fold = rows, fold
        torch.library.register_vmap(
            self._operator, lambda info, in_dims, *args: self._map(info.batch_size, in_dims, args), lib=_LIBRARY
        )
        self._transformable = self._make_transformable(setup_context, backward or self._refuse)
        differentiable = backward is not None
        self._function = self._make_function(setup_context, backward) if differentiable and not lists else None

    def __call__(self, *args):
        if _plain_eager():
            if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
                with torch._C._AutoDispatchBelowAutograd():
                    return self._operator(*args)
            if self._function is not None:
                return self._function(*args)
        if torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling():
            leaves, spec = tree_flatten(args)
            device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
            if device in self._autocast and torch.is_autocast_enabled(device):
                return self._autocast[device](*args)
            return self._transformable(spec, *leaves)
        return self._operator(*args)

    def _make_transformable(self, setup_context: Callable | None, backward: Callable) -> Callable:
        """The operator for ``torch.func``, whose transforms take no autograd formula that is registered with torch.

        Its arguments are flat, because gradients do not flow through lists, and come after their structure.
        """
        operator = self

        class Transformable(torch.autograd.Function):
            @staticmethod
            def forward(spec, *leaves):
                with torch._C._AutoDispatchBelowAutograd():
                    return operator._operator(*tree_unflatten(leaves, spec))

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.spec, *leaves = inputs
                if setup_context is not None:
                    setup_context(_StructuredContext(ctx), tree_unflatten(leaves, ctx.spec), output)

            @staticmethod
            def backward(ctx, *grads):
                return None, *tree_flatten(backward(_StructuredContext(ctx), *grads))[0]

            @staticmethod
            def vmap(info, in_dims, spec, *leaves):
                return operator._map(info.batch_size, tree_unflatten(in_dims[1:], spec), tree_unflatten(leaves, spec))

        Transformable.__name__ = self.name
        return Transformable.apply

    def _map(self, size: int, in_dims: Sequence, args: Sequence) -> tuple:
        """Results with the mapped dimension in front, and that it is there: 0 for each."""
        if size == 0:
            raise ValueError(f"moe_zero::{self.name} is mapped over a dimension of size 0; it must have an element")
        leaves, spec = tree_flatten(list(args))
        dims = tree_flatten(list(in_dims))[0]
        leaves = [leaf if dim is None else leaf.movedim(dim, 0) for leaf, dim in zip(leaves, dims, strict=True)]
        mapped = [dim is not None for dim in dims]
        of_args = [any(tree_flatten(flags)[0]) for flags in tree_unflatten(mapped, spec)]
        if self._fold and not any(of_arg for i, of_arg in enumerate(of_args) if i not in self._rows):
            args = tree_unflatten(leaves, spec)
            for i in self._rows:
                if args[i] is not None and not of_args[i]:
                    args[i] = args[i].expand(size, *args[i].shape)
            results = self._fold(*args)
        else:
            chosen = ([x[i] if flag else x for x, flag in zip(leaves, mapped, strict=True)] for i in range(size))
            steps = [self(*tree_unflatten(leaves, spec)) for leaves in chosen]
            if isinstance(steps[0], Tensor):
                return torch.stack(steps), 0
            results = tuple(map(torch.stack, zip(*steps, strict=True)))
        return results, (0,) * len(results)

    def _make_function(self, setup_context: Callable, backward: Callable) -> Callable:
        operator = self._operator

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                with torch._C._AutoDispatchBelowAutograd():
                    output = operator(*args)
                setup_context(ctx, args, output)
                return output

        Function.backward = staticmethod(backward)
        Function.__name__ = self.name
        return Function.apply

    def _autocast_kernel(self, device: str, cast: Sequence[int]) -> Callable:
        def kernel(*args):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return self(*(_cast(arg, dtype) if i in cast else arg for i, arg in enumerate(args)))

        return kernel

    def _refuse(self, ctx, *grads):
        raise RuntimeError(f"moe_zero::{self.name} cannot be differentiated: gradients of gradients are not available")


class _StructuredContext:
    """An autograd context whose ``needs_input_grad`` has the structure of the operator's arguments."""

    def __init__(self, ctx) -> None:
        object.__setattr__(self, "_ctx", ctx)

    @property
    def needs_input_grad(self) -> Sequence:
        return tree_unflatten(self._ctx.needs_input_grad[1:], self._ctx.spec)

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._ctx, name, value)


def _plain_eager() -> bool:
    """Whether nothing wants to see the operator between the caller and its kernel."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _cast(value: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return value if value.dtype == torch.float64 else value.to(dtype)
    return [_cast(tensor, dtype) for tensor in value]
