"""When layers are fetched, freed and reduced: one step of ZeRO-3 (arXiv 1910.02054, stage 3).

Whatever decides on a collective here depends only on the order in which the model's layers are called, which is the
same on all ranks; never on which gradients a rank happens to have, on time, or on garbage collection. So ranks whose
graphs differ still issue the same collectives in the same order.

- *Pass*: one call of the wrapped model. In it, the layer that followed the present one last time is fetched ahead.
- *Use*: one call of a layer in a pass that autograd recorded. Backward walks the live uses in reverse, fetching ahead
  too. Autograd runs nodes in reverse order of their creation, so when backward reaches a use, all later uses are
  finished.
- A layer's gradients are complete when all its parameters have theirs, or when backward has passed its earliest use, or
  at the end of backward. Reductions are issued in one fixed order, the reverse of the layers' earliest uses: a layer
  that is complete early waits for its turn.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from moe_zero.zero.collectives import Communicator, Pending
from moe_zero.zero.flat_layer import FlatLayer

MAX_LIVE_USES = 4096
"""Uses that are remembered when forward runs on and on without backward; older ones lose prefetching, nothing else."""

MAX_REDUCTIONS_UNDER_WAY = 1
"""While the gradients of another layer are computed. Each holds a layer's full gradients, so memory bounds them."""

try:
    _malloc_trim = ctypes.CDLL(None).malloc_trim
except (OSError, TypeError, AttributeError):  # not glibc
    _malloc_trim = None


@dataclass(eq=False)
class Use:
    """A call of a layer between two ticks of the schedule's clock."""

    layer: FlatLayer
    pass_number: int
    start: int
    end: int = -1
    version: int = -1  # of the layer's shards
    saved_parameters: bool = False  # autograd holds some
    reached: bool = False  # by the backward that runs


class _Backward:
    """What is known while backward runs."""

    def __init__(self, live: list[Use], also_reduce: list[FlatLayer], sync: bool):
        self.pending = list(live)  # uses that backward has not passed yet, in the order of their ends
        for use in live:
            use.reached = False
        self.sync = sync
        self.last: Use | None = None  # that backward reached
        self.newest_pass = -1
        earliest = dict.fromkeys(use.layer for use in sorted(live, key=lambda use: use.start) if use.layer.trains)
        self.turn = [*reversed(earliest), *(layer for layer in also_reduce if layer not in earliest)]
        self.complete: set[FlatLayer] = set()  # asked for membership only: iteration would not be the same on all ranks
        self.reductions: list[tuple[FlatLayer, Pending | Tensor]] = []
        self.unrecorded: FlatLayer | None = None  # the last layer that backward reached outside the recorded uses


class _EndOfBackward:
    """The engine calls it when backward is through; if backward raised instead, it is dropped without a call."""

    def __init__(self, schedule: Schedule):
        self._schedule = weakref.ref(schedule)
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._schedule()._end_backward()

    def __del__(self) -> None:
        schedule = self._schedule()
        if not self._called and schedule is not None:
            schedule._backward_failed = True


class Schedule:
    """Runs the layers of one model.

    Args:
        comm: collectives of the model.
        prefetch: number of layers to fetch ahead, 0 or more.
    """

    def __init__(self, comm: Communicator, prefetch: int = 1):
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}; it is the number of layers fetched ahead, 0 or more")
        self.comm = comm
        self.prefetch = prefetch
        self.layers: list[FlatLayer] = []
        self.sync = True
        self._clock = 0
        self._pass_number = 0
        self._pass_uses: list[Use] | None = None  # of the pass that runs now
        self._last_two: tuple[FlatLayer | None, FlatLayer | None] = (None, None)
        self._successors: dict[tuple[FlatLayer | None, FlatLayer | None], FlatLayer | None] = {}
        self._running: set[FlatLayer] = set()
        self._kept: set[FlatLayer] = set()  # resident between forward and backward
        self._live: list[Use] = []
        self._backward: _Backward | None = None
        self._backward_failed = False

    def add(self, layer: FlatLayer) -> None:
        self.layers.append(layer)
        layer.schedule = self

    @property
    def _offloads(self) -> bool:
        return any(layer.offload for layer in self.layers)

    # -- forward -----------------------------------------------------------------------------------------------------

    def call(self, layer: FlatLayer, forward: Callable, args: tuple, kwargs: dict):
        """``forward(*args, **kwargs)`` with the layer's full parameters in place."""
        if layer in self._running:
            return forward(*args, **kwargs)
        if _in_backward():
            return self._recompute(layer, forward, args, kwargs)
        if self._pass_uses is not None:
            self._successors[self._last_two] = layer
            self._last_two = (self._last_two[1], layer)
            return self._use(layer, forward, args, kwargs)
        return self.run_pass(self._use, layer, forward, args, kwargs)

    def run_pass(self, function: Callable, *args):
        """``function(*args)`` as one pass: the layers called in it are taken to be called in this order again."""
        if self._pass_uses is not None or _in_backward():
            return function(*args)
        if self._backward is not None:
            self._abandon_backward()
        for layer in self.layers:
            if layer.stale:
                self._free(layer)
        self._pass_number += 1
        self._pass_uses = []
        self._last_two = (None, None)
        try:
            output = function(*args)
        except BaseException:
            dropped = set(self._pass_uses)
            self._live = [use for use in self._live if use not in dropped]
            raise
        finally:
            self._pass_uses = None
            live = {use.layer for use in self._live}
            for layer in self.layers:
                if layer.resident and not (layer in self._kept and layer in live):
                    self._free(layer)
            if self._offloads:
                self.comm.synchronize_gathers()  # the caller may overwrite shards, which the host does at once
        self._successors[self._last_two] = None
        del self._live[:-MAX_LIVE_USES]
        return output

    def _use(self, layer: FlatLayer, forward: Callable, args: tuple, kwargs: dict):
        layer.follow_requires_grad()
        use = Use(layer, self._pass_number, self._tick())
        layer.start_fetch()
        for following in self._expected():
            following.start_fetch()
        layer.finish_fetch()
        use.version = layer.version
        output = self._run(use, forward, args, kwargs)
        use.end = self._tick()
        if torch.is_grad_enabled() and self._record(use, output):
            is_last = self._last_two != (None, None) and self._successors.get(self._last_two, layer) is None
            if is_last or not layer.reshard_after_forward:
                self._kept.add(layer)
        if layer not in self._kept:
            layer.free()
        return output

    def _expected(self) -> Iterator[FlatLayer]:
        """The layers that will be called next if this pass goes on like the last one that came by here."""
        last_two = self._last_two
        for _ in range(self.prefetch):
            following = self._successors.get(last_two)
            if following is None:
                return
            yield following
            last_two = (last_two[1], following)

    def _run(self, use: Use, forward: Callable, args: tuple, kwargs: dict):
        layer = use.layer
        self._running.add(layer)
        layer.show()
        try:
            if not torch.is_grad_enabled() or layer.never_freed:
                return forward(*args, **kwargs)
            with saved_tensors_hooks(*self._saving(use)):
                return forward(*args, **kwargs)
        finally:
            if not _in_backward():
                layer.hide()
            self._running.discard(layer)

    def _saving(self, use: Use) -> tuple[Callable, Callable]:
        """Hooks that fetch the layer when backward reads one of its parameters that autograd saved, by whatever way it
        got there: a loss from inside the layer reaches no output. Other tensors go to the hooks that are active
        already, those of activation checkpointing for example."""
        layer = use.layer
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: Tensor):
            if layer.owns(tensor):
                use.saved_parameters = True
                return tensor.detach(), "parameter"
            if outer is not None:
                return outer[0](tensor), "outer"
            # With hooks autograd no longer looks whether a saved tensor was overwritten.
            return tensor.detach(), tensor._version

        def unpack(packed):
            value, kind = packed
            if kind == "parameter":
                self._reach(use)
                return value
            if kind == "outer":
                return outer[1](value)
            if value._version != kind:
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)}, saved for backward while layer {layer.name!r} ran, has "
                    f"been modified by an inplace operation: it is at version {value._version}, not {kind}"
                )
            return value

        return pack, unpack

    def _record(self, use: Use, output: object) -> bool:
        """Remembers a use that backward may come to, and has backward announce itself. Whether there is one."""
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad and not tensor.is_leaf]
        if not outputs and not use.saved_parameters:
            return False
        self._live.append(use)
        self._pass_uses.append(use)
        for tensor in outputs:
            tensor.register_hook(lambda _: self._reach(use))
        return True

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _free(self, layer: FlatLayer) -> None:
        self._kept.discard(layer)
        layer.free()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> _Backward:
        if self._backward is not None and self._backward_failed:
            self._abandon_backward()
        if self._backward is None:
            also_reduce = [layer for layer in self.layers if layer.holds_gradients]
            self._backward = _Backward(self._live, also_reduce, self.sync)
            self._backward_failed = False
            Variable._execution_engine.queue_callback(_EndOfBackward(self))
        return self._backward

    def _reach(self, use: Use) -> None:
        """Backward is about to compute with the parameters of this use."""
        layer = use.layer
        if not _in_backward():  # someone looks at a saved tensor
            layer.finish_fetch()
            return
        if layer.version != use.version:
            raise RuntimeError(
                f"the parameters of layer {layer.name!r} have been modified (by an optimizer step or by loading "
                "values) since the forward whose backward runs now"
            )
        backward = self._begin_backward()
        if use is not backward.last:
            if use in backward.pending:
                for reached in [*self._passed_over(backward, use), use]:
                    self._arrive(backward, reached)
            else:
                self._arrive_unrecorded(backward, layer)
        layer.finish_fetch()
        layer.show()  # for what is computed again inside the layer

    def _passed_over(self, backward: _Backward, use: Use) -> list[Use]:
        """Uses between the last one reached and this one. This rank's gradient does not come by them, but that of other
        ranks may, so they must be fetched here too."""
        last = backward.last
        if last is None or last.pass_number != use.pass_number:
            return []
        between = [
            other
            for other in reversed(backward.pending)
            if not other.reached
            and other.pass_number == use.pass_number
            and use.end < other.start
            and other.end < last.end
        ]
        return between

    def _arrive(self, backward: _Backward, use: Use) -> None:
        use.reached = True
        before, backward.last = backward.last, use
        backward.newest_pass = max(backward.newest_pass, use.pass_number)
        passed = [other for other in backward.pending if other.start > use.end]
        backward.pending = [other for other in backward.pending if other.start <= use.end]
        to_come = {other.layer for other in backward.pending}

        following = [
            other.layer
            for other in reversed(backward.pending)
            if other.end < use.end and not other.reached and other.layer.reshard_after_forward
        ][: self.prefetch]
        needed = {use.layer, *following}
        for layer in dict.fromkeys(other.layer for other in passed):
            stays = not layer.reshard_after_forward and layer in to_come
            if not (layer in needed or layer in self._running or stays):
                self._free(layer)
        self._leave_unrecorded(backward, needed)
        # A layer larger than its neighbours, as embeddings often are, would set the peak of memory where it meets their
        # gradients. So it is not fetched ahead while they travel, and waits until they are reduced; but only for layers
        # that all ranks are through with, since another rank may need this fetch to get there.
        if not use.layer.resident:
            while backward.reductions and _bytes(backward.reductions[0][0]) < _bytes(use.layer):
                if backward.reductions[0][0] in to_come:
                    break
                self._finish_reduction(backward)
        use.layer.start_fetch()
        for layer in following:
            if before is not None and _bytes(layer) > max(_bytes(use.layer), _bytes(before.layer)):
                break
            layer.start_fetch()
        for layer in dict.fromkeys(other.layer for other in passed):
            if layer not in to_come:
                self._complete(backward, layer)

    def _arrive_unrecorded(self, backward: _Backward, layer: FlatLayer) -> None:
        if layer is not backward.unrecorded:
            self._leave_unrecorded(backward, {layer})
            backward.unrecorded = layer

    def _leave_unrecorded(self, backward: _Backward, needed: set[FlatLayer]) -> None:
        layer, backward.unrecorded = backward.unrecorded, None
        if layer is not None and layer not in needed and layer not in self._running and layer.reshard_after_forward:
            self._free(layer)

    def _recompute(self, layer: FlatLayer, forward: Callable, args: tuple, kwargs: dict):
        """Activation checkpointing calls a layer again. Its backward follows at once, so it is not freed here."""
        backward = self._begin_backward()
        if backward.last is None or backward.last.layer is not layer:
            self._arrive_unrecorded(backward, layer)
        layer.finish_fetch()
        use = Use(layer, self._pass_number, self._tick(), version=layer.version)
        return self._run(use, forward, args, kwargs)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def gradient_arrived(self, layer: FlatLayer) -> None:
        backward = self._begin_backward()
        # Nothing overlaps with the last reduction, so it waits for the end of backward, which frees all parameters.
        if layer.all_gradients_arrived and backward.turn[-1:] != [layer]:
            self._complete(backward, layer)

    def _complete(self, backward: _Backward, layer: FlatLayer) -> None:
        """The layer has all gradients that this backward gives it. Issues the reductions whose turn has come."""
        if not backward.sync or not layer.trains:
            return
        if layer.some_gradients_arrived and layer not in backward.turn:
            backward.turn.append(layer)
        backward.complete.add(layer)
        while backward.turn and backward.turn[0] in backward.complete:
            layer = backward.turn.pop(0)
            backward.complete.discard(layer)
            while len(backward.reductions) >= MAX_REDUCTIONS_UNDER_WAY:
                self._finish_reduction(backward)
            if self.comm.device.type == "cpu" and _malloc_trim is not None:
                # The activations that backward is through with left holes in the heaps, while shards of gradients need
                # more and more memory.
                _malloc_trim(0)
            backward.reductions.append((layer, layer.start_reduction()))

    def _finish_reduction(self, backward: _Backward) -> None:
        layer, gradient = backward.reductions.pop(0)
        layer.add_gradient(gradient.wait() if isinstance(gradient, Pending) else gradient)

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        for layer in self.layers:
            if layer.resident and layer not in self._running:
                self._free(layer)
        if backward.sync:
            for layer in [*backward.turn, *self.layers]:
                if layer in backward.turn or layer.some_gradients_arrived:
                    self._complete(backward, layer)
            while backward.reductions:
                self._finish_reduction(backward)
            if self._offloads:
                self.comm.synchronize()
            for layer in self.layers:
                layer.settle_gradients()
        else:
            for layer in self.layers:
                if layer in backward.turn or layer.some_gradients_arrived:
                    layer.hold_gradients()
        self._live = [use for use in self._live if use.pass_number > backward.newest_pass]

    def _abandon_backward(self) -> None:
        """After an exception in backward: nothing of it is left but what was already added to ``.grad``."""
        backward, self._backward, self._backward_failed = self._backward, None, False
        self._live.clear()
        for layer in self.layers:
            layer.discard_gradients()
            layer.forget_arriving()
            self._free(layer)
        for _, pending in backward.reductions:
            if isinstance(pending, Pending):
                with suppress(RuntimeError):  # the next collective raises it again
                    pending.wait()


def _bytes(layer: FlatLayer) -> int:
    return layer.plan.flat_bytes


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a structure of lists, tuples, dicts, dataclasses and objects with attributes like those of model
    outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
