"""What `Zero3Layer`, `Zero3Sequential` and the result of `shard` have in common: what training needs of sharded
parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe_zero.zero.collectives import Communicator, Statistics
from moe_zero.zero.flat_layer import FROZEN_PARAMS_IDX, TRAINING_PARAMS_IDX, FlatLayer
from moe_zero.zero.schedule import Schedule


class ShardedModule(nn.Module):
    """A module whose parameters are sharded over ranks by layers (ZeRO-3, arXiv 1910.02054).

    ``parameters()`` and ``named_parameters()`` give this rank's flat shards, so that optimizers can be built on them.
    What is marked collective must be called on all ranks.
    """

    _schedule: Schedule
    _buffer_names: list[tuple[str, nn.Module, str]]  # persistent ones: name, owner, attribute
    _state_names: list[str]  # the order of the unsharded state dict
    _saving = None  # the checkpoint that is being written

    @property
    def flat_layers(self) -> list[FlatLayer]:
        return self._schedule.layers

    @property
    def comm(self) -> Communicator:
        return self._schedule.comm

    @property
    def statistics(self) -> Statistics:
        """Calls and bytes of each collective and the time waited for it, in total and per layer."""
        return self.comm.statistics

    # -- what the optimizer gets -------------------------------------------------------------------------------------

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's flat trainable shards, one per layer (one per layer and tag with ``group_fn``)."""
        return [leaf.parameter for layer in self.flat_layers for leaf in layer.leaves]

    def param_groups(self, groups: Sequence[Mapping] = ({},)) -> list[dict]:
        """Parameter groups for an optimizer.

        Args:
            groups: the options of each tag that ``group_fn`` gives, by position, for example
                ``[{"weight_decay": 0.01}, {"weight_decay": 0.0}]``; by default one without options.

        Raises:
            ValueError: a parameter's tag has no entry in ``groups``.
        """
        tags: dict[int, str] = {}
        for layer in self.flat_layers:
            for slot in layer.slots:
                if slot.parameter.requires_grad:
                    tags.setdefault(slot.tag, slot.name)
        for tag, name in tags.items():
            if not 0 <= tag < len(groups):
                raise ValueError(f"groups has {len(groups)} entries, but group_fn gives parameter {name!r} tag {tag}")
        leaves = [leaf for layer in self.flat_layers for leaf in layer.leaves]
        return [
            {**options, "params": [leaf.parameter for leaf in leaves if leaf.tag == tag]}
            for tag, options in enumerate(groups)
        ]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's flat shards: ``LAYER.chunk.0`` trainable (``LAYER.chunk.0.0`` and so on where tags differ) and
        ``LAYER.chunk.1`` frozen."""
        start = f"{prefix}." if prefix else ""
        for layer in self.flat_layers:
            name = f"{start}{layer.name}.chunk"
            for i, leaf in enumerate(layer.leaves):
                yield f"{name}.{TRAINING_PARAMS_IDX}{f'.{i}' if len(layer.leaves) > 1 else ''}", leaf.parameter
            if layer.chunk[FROZEN_PARAMS_IDX].numel():
                yield f"{name}.{FROZEN_PARAMS_IDX}", layer.chunk[FROZEN_PARAMS_IDX]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the shards, and full gradients kept under :meth:`no_sync`."""
        super().zero_grad(set_to_none)
        for layer in self.flat_layers:
            layer.discard_gradients()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales all gradients by one factor so that their global norm, over all ranks, is at most ``max_norm``;
        padding is zero and does not count. Collective. The norm of order 2 needs no pass over the gradients: their
        reduction left the sums of squares.

        Returns:
            the norm before, a scalar tensor, equal on all ranks.

        Raises:
            RuntimeError: the norm is inf or NaN and ``error_if_nonfinite``.
        """
        gradients = [chunk.grad for chunk in self.get_trainable_chunk() if chunk.grad is not None]
        norm_type = float(norm_type)
        # The same on all ranks, whatever leaves they own.
        is_double = any(layer.dtype == torch.float64 for layer in self.flat_layers)
        dtype = torch.float64 if is_double else torch.float32
        if norm_type == 2:
            squares = [layer.sum_of_squares().to(self.comm.device) for layer in self.flat_layers]
            total = self.comm.sum(torch.stack(squares).sum()).sqrt().to(dtype)
        else:
            norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in gradients]
            norms = (
                torch.stack(norms).to(self.comm.device)
                if norms
                else torch.zeros(1, dtype=dtype, device=self.comm.device)
            )
            if norm_type == float("inf"):
                total = self.comm.maximum(norms.max())
            else:
                total = self.comm.sum(norms.pow(norm_type).sum()).pow(1.0 / norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the gradients' global norm of order {norm_type} is {total.item()}")
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates full gradients on each rank, without communication; the first backward
        outside reduces them together with its own. Costs the memory of unsharded gradients."""
        before, self._schedule.sync = self._schedule.sync, False
        try:
            yield
        finally:
            self._schedule.sync = before

    # -- full values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict_full(self, *, rank0_only: bool = False, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """All parameters and persistent buffers under the names of the unsharded module, so that it loads them with
        ``load_state_dict``. One layer is gathered at a time. Collective.

        Args:
            rank0_only: the other ranks take part and get an empty dict.
            device: where the result is to be.

        Parameters come in the dtype of the shards (the fp32 masters in mixed precision).
        """
        wanted = not rank0_only or self.comm.rank == 0
        state: dict[str, Tensor] = {}
        for name, value in self.full_tensors():
            if wanted:
                state[name] = value.to(device)
        return {name: state[name] for name in self._state_names if wanted}

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, layer by layer, and persistent buffers, by their unsharded names, as new tensors on the
        device. Collective: every rank goes through all of them. Memory of a layer lasts as long as the caller keeps
        it."""
        for layer in self.flat_layers:
            for slot, value in zip(layer.slots, layer.gather_values(), strict=True):
                for name in slot.names:
                    yield name, value
        for name, owner, attribute in self._buffer_names:
            yield name, owner._buffers[attribute].clone()

    def full_shapes(self) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
        """Name, shape and dtype of what :meth:`full_tensors` gives, in the same order."""
        for layer in self.flat_layers:
            for slot in layer.slots:
                for name in slot.names:
                    yield name, slot.placeholder.shape, layer.dtype
        for name, owner, attribute in self._buffer_names:
            buffer = owner._buffers[attribute]
            yield name, buffer.shape, buffer.dtype

    @torch.no_grad()
    def load_state_dict_full(
        self, state: Mapping[str, Tensor] | None, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Sets all parameters and persistent buffers from rank 0's unsharded ``state``; other ranks may pass ``None``.
        Collective. Optimizer states stay as they are.

        Returns:
            the names that ``state`` lacks and those that the model lacks; both empty if ``strict``.

        Raises:
            ValueError: names (if ``strict``) or shapes differ; then nothing was changed on any rank.
        """
        missing, unexpected, error = [], [], None
        if self.comm.rank == 0:
            try:
                missing, unexpected = self._compare_state(state, strict)
            except (ValueError, TypeError) as problem:
                error = problem
        self.comm.agree("load_state_dict_full()", None, error)
        missing, unexpected = self.comm.all_objects((missing, unexpected), "load_state_dict_full()")[0]
        for layer in self.flat_layers:
            current = None
            if any(slot.name in missing for slot in layer.slots):
                current = layer.gather_values()
            layer.free()
            values = None
            if self.comm.rank == 0:
                values = [
                    current[i] if slot.name in missing else state[slot.name] for i, slot in enumerate(layer.slots)
                ]
            layer.scatter(values)
        for name, owner, attribute in self._buffer_names:
            if self.comm.rank == 0 and name in state:
                owner._buffers[attribute].copy_(state[name])
            broadcast(self.comm, owner._buffers[attribute])
        return missing, unexpected

    def _compare_state(self, state: Mapping[str, Tensor] | None, strict: bool) -> tuple[list[str], list[str]]:
        if state is None:
            raise TypeError("state is None on rank 0, whose values count; pass the unsharded state dict there")
        shapes = {name: tuple(shape) for name, shape, _ in self.full_shapes()}
        missing = [name for name in self._state_names if name not in state]
        unexpected = [name for name in state if name not in shapes]
        if strict and (missing or unexpected):
            raise ValueError(
                f"state lacks {missing} and has {unexpected}, which the model has not; strict=False allows both"
            )
        stored = getattr(state, "shapes", None)  # of tensors that are read when they are asked for
        for name, shape in shapes.items():
            if name in state:
                given = tuple(state[name].shape if stored is None else stored[name])
                if given != shape:
                    raise ValueError(f"state[{name!r}] has shape {given}; the model has {shape}")
        return missing, unexpected

    def state_dict(
        self, *, destination: dict | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """The full state, as :meth:`state_dict_full`. Collective."""
        destination = {} if destination is None else destination
        destination.update((prefix + name, value) for name, value in self.state_dict_full().items())
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """Loads a full state, as :meth:`load_state_dict_full`. Collective."""
        if assign:
            raise ValueError("assign=True would replace shards by full parameters; use assign=False")
        return self.load_state_dict_full(state_dict, strict)

    # -- what cannot be ----------------------------------------------------------------------------------------------

    def _apply(self, *args, **kwargs):
        raise RuntimeError(
            "the parameters are sharded: device and dtype were fixed then; move or convert the module before, or pass "
            "device, "
            "dtype and compute_dtype"
        )

    def requires_grad_(self, requires_grad: bool = True):
        raise RuntimeError("the parameters are sharded; freeze layers or parameters of the wrapped module itself")


def broadcast(comm: Communicator, tensor: Tensor) -> None:
    """Rank 0's values of a tensor of any dtype, strides and device. Collective."""
    if comm.alone or tensor.numel() == 0:
        return
    as_bytes = tensor.detach().to(comm.device).contiguous().reshape(-1).view(torch.uint8)
    comm.broadcast(as_bytes)
    tensor.copy_(as_bytes.view(tensor.dtype).view(tensor.shape))
