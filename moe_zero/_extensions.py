"""Loads the compiled extensions and remembers what came of it. Importing this module never fails."""

import importlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

_REBUILD = "reinstall with `pip install --force-reinstall --no-deps .` in the source folder (-v shows the compiler)"


@dataclass(frozen=True)
class Extension:
    """One compiled extension: where it is, whether it is loaded, for which architectures, and if not, why not."""

    name: str
    path: str | None
    loaded: bool
    architectures: tuple[str, ...]
    reason: str | None


def build_info() -> dict:
    """What setup.py recorded when the extensions were built: torch version, CUDA version and architectures, what was
    skipped and why. Empty if the package was not built."""
    try:
        return json.loads(Path(__file__).with_name("_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


def _load(
    name: str, needs: str | None = None, architectures: tuple[str, ...] = ()
) -> tuple[Extension, ModuleType | None]:
    spec = importlib.util.find_spec(f"moe_zero.{name}")
    if spec is None:
        skipped = build_info().get("skipped", {}).get(f"moe_zero.{name}")
        reason = (
            f"skipped when the package was built: {skipped}" if skipped else f"not built for this Python; {_REBUILD}"
        )
        return Extension(name, None, False, (), reason), None
    if needs:
        return Extension(name, spec.origin, False, architectures, needs), None
    try:
        module = importlib.import_module(f"moe_zero.{name}")
    except (ImportError, OSError, RuntimeError) as error:
        old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10)
        remedy = "torch 2.10 or newer is needed" if old else _REBUILD
        return Extension(name, spec.origin, False, architectures, f"{error}; {remedy}"), None
    if hasattr(module, "init"):
        module.init(torch.Tensor, torch.nn.Parameter)
    return Extension(name, spec.origin, True, architectures, None), module


def _cuda_architectures() -> tuple[str, ...]:
    return tuple(arch for arch in build_info().get("cuda_architectures", "").replace(" ", ";").split(";") if arch)


_NO_CUDA = None if torch.version.cuda else f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"

_flat_plan_extension, flat_plan = _load("_flat_plan")
_cpu_extension, ops_cpu = _load("_ops_cpu")
_cuda_extension, ops_cuda = _load("_ops_cuda", _NO_CUDA, _cuda_architectures())


def extensions() -> list[Extension]:
    """The three extensions of the package, in the order in which they build on each other. For the CPU operators the
    architecture is the instruction set in use."""
    cpu = _cpu_extension
    if ops_cpu is not None:
        cpu = replace(cpu, architectures=(ops_cpu.kernels(),))
    return [_flat_plan_extension, cpu, _cuda_extension]
