"""Any model, sharded layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_zero.zero.building import ComputeDtype, build, communicator, device_of, layer_modules
from moe_zero.zero.sharded_module import ShardedModule


class ShardedModel(ShardedModule):
    """What :func:`shard` returns: called like the model, which is ``module``."""

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def shard(
    model: nn.Module,
    layers: type[nn.Module] | str | Sequence[type[nn.Module] | str],
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    group_fn: Callable[[str, nn.Parameter], int] | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    compute_dtype: ComputeDtype = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    init_fn: Callable[[nn.Module], None] | None = None,
    offload: bool = False,
    reduce_algorithm: str = "auto",
    timeout: timedelta | None = None,
) -> ShardedModel:
    """Shards a model's parameters, gradients and optimizer states over ranks (ZeRO-3, arXiv 1910.02054), in place.

    Each module that ``layers`` matches is gathered when it is called, freed afterwards, and gathered again for
    backward; its gradients are averaged over ranks by one reduce-scatter per backward, however often it was called
    before. What is in no such module (embeddings, heads), and parameters that several of them share, are one more
    layer, which stays from forward to backward. The order of the layers is learned in the first forward, and followed
    ahead from then on. Rank 0's initial values win; buffers are broadcast. Without a process group the world size is 1
    and nothing is communicated.

    Args:
        model: plain module; its parameters become placeholders outside calls.
        layers: classes, or patterns of module names as in :mod:`fnmatch` (``"encoder.layer.*"``), or several of them.
            Inside a matched module others may match.
        process_group: as in :class:`Zero3Layer`; a ``DeviceMesh`` (replicate, shard) shards inside a node and
            replicates across.
        group_fn: gives each parameter, by name and itself, an integer tag; see :meth:`ShardedModule.param_groups`.
        device, dtype, compute_dtype, reduce_dtype, init_fn, offload, reduce_algorithm, timeout: as in
            :class:`Zero3Layer`.
        reshard_after_forward: ``False`` keeps full parameters from forward to backward: one gather less, more memory.
        prefetch: number of layers fetched ahead.

    Raises (on all ranks alike, before the model is changed):
        ValueError, TypeError: an argument does not fit.
        RanksDisagree: ranks were given different models or arguments.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}; it must be a torch.nn.Module")
    comm = communicator(process_group, device_of(model, device), reduce_algorithm, timeout)
    sharded = ShardedModel()
    build(
        sharded,
        model,
        lambda: layer_modules(model, layers),
        comm,
        prefetch=prefetch,
        dtype=dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        group_fn=group_fn,
        init_fn=init_fn,
        offload=offload,
    )
    sharded.module = model
    return sharded
