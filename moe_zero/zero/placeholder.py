"""What a module shows in place of a parameter while its full value does not exist."""

from __future__ import annotations

import torch
from torch import nn

# `is_leaf` is not among them, so that an optimizer refuses a placeholder instead of never updating it.
_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "layout", "grad", "grad_fn", "is_cuda", "is_meta",
                 "_backward_hooks")
} | {
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.requires_grad_,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
}  # fmt: skip


class ShardedParameter(nn.Parameter):
    """Shape, dtype and ``requires_grad`` of a parameter that is sharded over ranks. It has no values: whatever would
    read or write them raises an error that names the parameter and says how to get at it."""

    _name: str

    @staticmethod
    def of(parameter: torch.Tensor, name: str) -> ShardedParameter:
        empty = torch.empty_like(parameter, device="meta")
        placeholder = torch.Tensor._make_subclass(ShardedParameter, empty, parameter.requires_grad)
        placeholder._name = name
        return placeholder

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        names = [arg._name for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, ShardedParameter)]
        if getattr(function, "__name__", None) in ("__get__", "__set__"):
            function = function.__self__  # the property, which has the telling name
        raise RuntimeError(
            f"{getattr(function, '__name__', function)} on parameter {(names or ['?'])[0]!r}, which is sharded over "
            "ranks: its values exist only while its layer runs. Give the optimizer `param_groups()` or "
            "`get_trainable_chunk()`, read all values with `state_dict_full()`, write them with "
            "`load_state_dict_full()`, and run the layer by calling it"
        )

    def __repr__(self) -> str:  # plain repr would read values
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedParameter({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo):
        raise RuntimeError(f"parameter {self._name!r} is sharded over ranks; copy the model before sharding it")

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"parameter {self._name!r} is sharded over ranks; save the model with `save_checkpoint` "
                           "or `state_dict_full()`")  # fmt: skip
