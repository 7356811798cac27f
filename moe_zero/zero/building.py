"""From a module with ordinary parameters to flat layers: what `Zero3Layer` and `shard` do at construction."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from moe_zero import __version__
from moe_zero.zero.collectives import Communicator
from moe_zero.zero.flat_layer import FlatLayer, Slot
from moe_zero.zero.placeholder import ShardedParameter
from moe_zero.zero.schedule import Schedule
from moe_zero.zero.sharded_module import ShardedModule, broadcast

ComputeDtype = torch.dtype | Callable[[str, nn.Parameter], torch.dtype | None] | None


def communicator(
    process_group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    reduce_algorithm: str,
    timeout: timedelta | None,
) -> Communicator:
    """Of a process group, or of a mesh: one dimension shards; of two, the first replicates and the second shards."""
    accepted = process_group is None or isinstance(process_group, (dist.ProcessGroup, DeviceMesh))
    if not accepted and process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"process_group is {process_group!r}; it must be a ProcessGroup, a DeviceMesh or None for all ranks"
        )
    replicate_group = None
    if isinstance(process_group, DeviceMesh):
        mesh = process_group
        if mesh.ndim > 2:
            raise ValueError(f"process_group is a mesh of {mesh.ndim} dimensions; use (shard,) or (replicate, shard)")
        process_group = mesh.get_group(mesh.ndim - 1)
        replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    return Communicator(
        process_group, device, replicate_group=replicate_group, reduce_algorithm=reduce_algorithm, timeout=timeout
    )


def device_of(module: nn.Module, device: torch.device | str | int | None) -> torch.device:
    """Where shards are to live: as asked, or where the parameters are (the default device for the meta device's)."""
    if device is not None:
        return torch.device(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.get_default_device()


def build(
    sharded: ShardedModule,
    module: nn.Module,
    owners: Callable[[], dict[str, nn.Module]],
    comm: Communicator,
    *,
    prefetch: int,
    dtype: torch.dtype | None,
    compute_dtype: ComputeDtype,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    group_fn: Callable[[str, nn.Parameter], int] | None,
    init_fn: Callable[[nn.Module], None] | None,
    offload: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Shards the parameters of ``module`` in place and equips ``sharded`` with a schedule. Collective.

    ``owners`` gives the modules that become layers by their names; the module itself, under the name ``""``, gets what
    is in none of them or in several. All that can be wrong is found before the first parameter is changed, and refused
    on all ranks.
    """
    layers, error, fingerprint = {}, None, None
    try:
        comm.check()
        check()
        schedule = Schedule(comm, prefetch)
        modules = {**owners(), "": module}
        offload = _offloads(offload, comm)
        cast_inputs = compute_dtype if isinstance(compute_dtype, torch.dtype) else None
        if cast_inputs is not None:
            compute_dtype = _floating_to(cast_inputs)
        if init_fn is None:
            _check_resettable(module)
        for name, slots in slots_of_layers(module, modules, group_fn).items():
            layers[name] = FlatLayer(
                name or type(module).__name__,
                slots,
                comm,
                dtype=dtype,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                # The rest of a model is at work before and after everything else: backward needs it first and last.
                reshard_after_forward=reshard_after_forward and (name != "" or len(modules) == 1),
                offload=offload,
            )
        fingerprint = {
            "torch version": torch.__version__,
            "moe_zero version": __version__,
            "prefetch": prefetch,
            **{f"layer {layer.name!r}": layer.fingerprint() for layer in layers.values()},
        }
    except (ValueError, TypeError, AttributeError) as problem:
        error = problem
    comm.agree("the model or the arguments of sharding", fingerprint, error)

    sharded._state_names = list(module.state_dict())
    persistent = set(sharded._state_names)
    sharded._schedule = schedule
    sharded._buffer_names = []
    for name, layer in layers.items():
        _materialise(layer, comm.device, init_fn if comm.rank == 0 else _leave_as_it_is)
        layer.take_over()
        schedule.add(layer)
        _run_through(modules[name], layer, cast_inputs)
    for path, owner in module.named_modules():
        if any(buffer is not None and buffer.is_meta for buffer in owner._buffers.values()):
            _initialise(owner, comm.device, init_fn if comm.rank == 0 else _leave_as_it_is)
        for attribute, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer.device != comm.device:
                buffer = owner._buffers[attribute] = buffer.to(comm.device)
            broadcast(comm, buffer)
            name = f"{path}.{attribute}" if path else attribute
            if name in persistent:
                sharded._buffer_names.append((name, owner, attribute))


def _offloads(offload: bool, comm: Communicator) -> bool:
    if not isinstance(offload, bool):
        raise TypeError(f"offload is {offload!r}; it must be True or False")
    if offload and comm.device.type == "cpu":
        if comm.rank == 0:
            warnings.warn("offload=True changes nothing on a CPU: the shards are in host memory anyway", stacklevel=5)
        return False
    return offload


def layer_modules(
    model: nn.Module, layers: type[nn.Module] | str | Sequence[type[nn.Module] | str]
) -> dict[str, nn.Module]:
    """The modules that classes and patterns of names choose, in the order of ``named_modules()``, by their names."""
    if not isinstance(layers, (type, str, Sequence)):
        raise TypeError(f"layers is {layers!r}; use a module class, a pattern of module names, or a list of them")
    wanted = [layers] if isinstance(layers, (type, str)) else list(layers)
    if not wanted:
        raise ValueError("layers is empty; name the classes or patterns of the modules that are to be gathered as one")
    found: dict[str, nn.Module] = {}
    for criterion in wanted:
        if isinstance(criterion, str):
            matches = {name: m for name, m in model.named_modules() if name and fnmatchcase(name, criterion)}
        elif isinstance(criterion, type) and issubclass(criterion, nn.Module):
            matches = {name: m for name, m in model.named_modules() if name and isinstance(m, criterion)}
        else:
            raise TypeError(f"layers has {criterion!r}; use module classes and patterns of module names")
        if not matches and isinstance(criterion, type) and isinstance(model, criterion):
            raise ValueError(
                f"layers has {criterion!r}, which is the model itself and none of its modules; a module that is one "
                "layer as a whole goes into Zero3Layer"
            )
        if not matches:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"layers has {criterion!r}, which matches no module; the model has {', '.join(classes)}")
        found.update(matches)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def slots_of_layers(
    module: nn.Module, modules: dict[str, nn.Module], group_fn: Callable[[str, nn.Parameter], int] | None = None
) -> dict[str, list[Slot]]:
    """The parameters of each layer: those of its module that are in no layer inside it."""
    for name, inner in module.named_modules():
        if isinstance(inner, ShardedModule):
            raise ValueError(f"{f'module {name!r}' if name else 'the model'} is sharded already; shard a model once")
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, ShardedParameter):
            raise ValueError(f"parameter {name!r} is sharded already")
        names.setdefault(id(parameter), []).append(name)
    slots: dict[int, Slot] = {}
    owners: dict[int, dict[str, None]] = {}
    layer_of_module = {id(layer): name for name, layer in modules.items()}

    def collect(inner: nn.Module, layer: str) -> None:
        layer = layer_of_module.get(id(inner), layer)
        for attribute, parameter in inner._parameters.items():
            if parameter is None:
                continue
            slot = slots.get(id(parameter))
            if slot is None:
                slot = slots[id(parameter)] = Slot(names[id(parameter)], [], parameter)
                slot.tag = 0 if group_fn is None else group_fn(slot.name, parameter)
                if not isinstance(slot.tag, int):
                    raise TypeError(f"group_fn gave {slot.tag!r} for parameter {slot.name!r}; a tag is an int")
            if (inner, attribute) not in slot.sites:
                slot.sites.append((inner, attribute))
            owners.setdefault(id(parameter), {})[layer] = None
        for child in inner.children():
            collect(child, layer)

    collect(module, "")
    of_layer: dict[str, list[Slot]] = {name: [] for name in modules}
    for key, slot in slots.items():
        # A parameter tied across layers belongs to the rest of the model, which is there whenever one of its layers is.
        of_layer[next(iter(owners[key])) if len(owners[key]) == 1 else ""].append(slot)
    return of_layer


def _floating_to(dtype: torch.dtype) -> Callable[[str, nn.Parameter], torch.dtype]:
    return lambda name, parameter: dtype


def _check_resettable(module: nn.Module) -> None:
    for name, owner in module.named_modules():
        own = (*owner._parameters.values(), *owner._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in own) and not hasattr(owner, "reset_parameters"):
            raise ValueError(
                f"module {name!r} ({type(owner).__name__}) has parameters or buffers on the meta device and no "
                "reset_parameters(); pass init_fn, which initialises those that a module itself has"
            )


def _materialise(layer: FlatLayer, device: torch.device, init_fn: Callable[[nn.Module], None] | None) -> None:
    """Gives a layer's parameters on the meta device memory and initial values."""
    owners = {site[0]: None for slot in layer.slots if slot.parameter.is_meta for site in slot.sites}
    for slot in layer.slots:
        if slot.parameter.is_meta:
            empty = torch.empty_like(slot.parameter, device=device)
            slot.parameter = nn.Parameter(empty, requires_grad=slot.parameter.requires_grad)
            for owner, attribute in slot.sites:
                owner._parameters[attribute] = slot.parameter
    for owner in owners:
        _initialise(owner, device, init_fn)


@torch.no_grad()
def _initialise(module: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], None] | None) -> None:
    for attribute, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = torch.empty_like(buffer, device=device)
    module.reset_parameters() if init_fn is None else init_fn(module)


def _leave_as_it_is(module: nn.Module) -> None:
    """Rank 0's values count."""


def _run_through(module: nn.Module, layer: FlatLayer, cast_inputs: torch.dtype | None) -> None:
    """Makes calls of the module go through the layer's schedule."""
    forward = module.forward

    @functools.wraps(forward)
    def scheduled(*args, **kwargs):
        if cast_inputs is not None:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: _cast(x, cast_inputs), (args, kwargs))
        return layer.schedule.call(layer, forward, args, kwargs)

    module.forward = scheduled


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
