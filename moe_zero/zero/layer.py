"""One sharded layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_zero.zero.building import ComputeDtype, build, communicator, device_of
from moe_zero.zero.flat_layer import FlatLayer
from moe_zero.zero.sharded_module import ShardedModule


class Zero3Layer(ShardedModule):
    """Wraps one layer and shards its parameters, gradients and optimizer states over ranks (ZeRO-3, arXiv 1910.02054).

    Rank 0's initial values win and are scattered, its buffers are broadcast. Call it like the layer: the full
    parameters are gathered for forward and again for backward, the gradients averaged over ranks by one reduce-scatter
    per backward, however often the layer was called before. When ``backward()`` returns, ``chunk[0].grad`` is there;
    parameters that got no gradient have zeros. Several layers in a row overlap communication with computation in
    :class:`Zero3Sequential`; whole models are sharded by :func:`moe_zero.zero.shard`.

    Args:
        module: the layer, or a sequence of modules that are to be one layer. Its parameters become placeholders outside
            calls.
        rank, world_size: of this process in ``process_group``; default: as there.
        device: where the shards live; default: where the parameters are.
        dtype: of the shards, and so of gradients and optimizer states; default: that of the parameters.
        process_group: default: the default group. Without one the world size is 1 and nothing is communicated. A
            ``DeviceMesh`` shards over its last dimension and replicates over the first of two.
        compute_dtype: of the full parameters (bf16 or fp16 over fp32 shards); floating inputs are converted too. Or a
            function of a parameter's name and itself that gives a dtype or ``None`` for its own; inputs are then left
            to autocast.
        reduce_dtype: in which gradients travel; default: that of the full parameters. Sums are in fp32.
        group_fn: gives each parameter, by name and itself, an integer tag; see :meth:`param_groups`.
        init_fn: initialises the own parameters of a module, for layers on the meta device; default:
            ``reset_parameters()``.
        offload: keep shards, their gradients and so the optimizer's states in pinned host memory, where the optimizer
            then computes; shards are copied to the device, and gradients back, on the collectives' streams. Of no
            effect (and a warning) on a CPU.
        reduce_algorithm: ``"auto"``, ``"all_to_all"`` or ``"reduce_scatter"``.
        timeout: of the collectives; default: PyTorch's.

    Attributes:
        chunk: ``[trainable, frozen]``, this rank's flat shards; ``chunk[TRAINING_PARAMS_IDX]`` is what is trained.
            Padding at the ends of parameter groups is zero.
        chunk_size: their numbers of elements, equal on all ranks.

    Raises (on all ranks alike, before the layer is changed):
        ValueError, TypeError: an argument does not fit.
        RanksDisagree: ranks were given different layers or arguments.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        compute_dtype: ComputeDtype = None,
        reduce_dtype: torch.dtype | None = None,
        group_fn: Callable[[str, nn.Parameter], int] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        offload: bool = False,
        reduce_algorithm: str = "auto",
        timeout: timedelta | None = None,
    ):
        super().__init__()
        if not isinstance(module, nn.Module):
            module = nn.Sequential(*module)
        comm = communicator(process_group, device_of(module, device), reduce_algorithm, timeout)

        def check() -> None:
            for name, given, actual in (("rank", rank, comm.rank), ("world_size", world_size, comm.world_size)):
                if given is not None and given != actual:
                    raise ValueError(f"{name} is {given}, but in the process group it is {actual}")

        build(
            self,
            module,
            dict,
            comm,
            prefetch=0,
            dtype=dtype,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=True,
            group_fn=group_fn,
            init_fn=init_fn,
            offload=offload,
            check=check,
        )
        self.module = module
        self.flat = self._schedule.layers[0]

    @property
    def flat_layers(self) -> list[FlatLayer]:
        return [self.flat]

    @property
    def chunk(self) -> list[nn.Parameter]:
        return self.flat.chunk

    @property
    def chunk_size(self) -> list[int]:
        return [chunk.numel() for chunk in self.chunk]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def fetch_params(self) -> None:
        """Gathers the full parameters and puts them into the module; free if they are there. Collective."""
        self.flat.finish_fetch()
        self.flat.show()

    def free_params(self) -> None:
        """Gives back the memory of the full parameters and puts placeholders into the module."""
        self.flat.free()
