"""Sharded layers in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from moe_zero.zero.layer import Zero3Layer
from moe_zero.zero.schedule import Schedule
from moe_zero.zero.sharded_module import ShardedModule


class Zero3Sequential(ShardedModule):
    """Runs modules one after the other, each on the output of the one before, fetching sharded layers ahead of time: in
    forward the following, in backward the preceding, while the present one computes.

    Args:
        modules: :class:`Zero3Layer` objects, and modules without parameters (activations, dropout) between them.
        prefetch: number of layers fetched ahead.

    Raises:
        ValueError: a module with parameters is no ``Zero3Layer``, or layers are sharded over different ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], prefetch: int = 1):
        super().__init__()
        modules = list(modules)
        layers = [module for module in modules if isinstance(module, Zero3Layer)]
        if not layers:
            raise ValueError("modules has no Zero3Layer; wrap the layers that are to be sharded")
        first = layers[0].comm
        for i, module in enumerate(modules):
            if isinstance(module, Zero3Layer):
                comm = module.comm
                if (comm.process_group, comm.replicate_group, comm.device) != (
                    first.process_group,
                    first.replicate_group,
                    first.device,
                ):
                    raise ValueError(f"modules[{i}] is sharded over other ranks or devices than the first Zero3Layer")
            elif next(module.parameters(), None) is not None:
                raise ValueError(f"modules[{i}] ({type(module).__name__}) has parameters; wrap it in a Zero3Layer")
        self._schedule = Schedule(first, prefetch)
        self._buffer_names = []
        self._state_names = []
        for i, module in enumerate(modules):
            if isinstance(module, Zero3Layer):
                names, buffers = module._state_names, module._buffer_names
                module.flat.join(first, str(i))
                self._schedule.add(module.flat)
                module._schedule = self._schedule
            else:
                names = list(module.state_dict())
                buffers = [
                    (name, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names
                ]
            self._state_names += [f"{i}.{name}" for name in names]
            self._buffer_names += [(f"{i}.{name}", owner, attribute) for name, owner, attribute in buffers]
        self.layers = nn.ModuleList(modules)

    def forward(self, x):
        return self._schedule.run_pass(self._forward, x)

    def _forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]
