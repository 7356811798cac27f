"""Loads the compiled extensions and remembers what came of it. Importing this module never fails."""

import importlib
import importlib.util
import json
from dataclasses import dataclass
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


def _find(name: str) -> str | None:
    spec = importlib.util.find_spec(f"moe_zero.{name}")
    return spec.origin if spec else None


def _load_flat_plan() -> tuple[Extension, ModuleType | None]:
    path = _find("_flat_plan")
    if path is None:
        return Extension("_flat_plan", None, False, (), f"not built for this Python; {_REBUILD}"), None
    try:
        module = importlib.import_module("moe_zero._flat_plan")
    except ImportError as error:
        return Extension("_flat_plan", path, False, (), f"{error}; {_REBUILD}"), None
    return Extension("_flat_plan", path, True, (), None), module


def _load_operators(name: str, architectures: tuple[str, ...]) -> Extension:
    path = _find(name)
    if path is None:
        reason = build_info().get("skipped", {}).get(f"moe_zero.{name}")
        reason = f"skipped when the package was built: {reason}" if reason else f"not built; {_REBUILD}"
        return Extension(name, None, False, (), reason)
    if name == "_ops_cuda" and torch.version.cuda is None:
        return Extension(name, path, False, (), f"torch {torch.__version__} has no CUDA; install a CUDA build of torch")
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        hint = "torch 2.10 or newer is needed" if torch.__version__ < "2.10" else _REBUILD
        return Extension(name, path, False, architectures, f"{error}; {hint}")
    return Extension(name, path, True, architectures, None)


def _cuda_architectures() -> tuple[str, ...]:
    return tuple(arch for arch in build_info().get("cuda_architectures", "").replace(" ", ";").split(";") if arch)


_flat_plan_extension, flat_plan = _load_flat_plan()
_cpu_extension = _load_operators("_ops_cpu", ())
_cuda_extension = _load_operators("_ops_cuda", _cuda_architectures())


def extensions() -> list[Extension]:
    """The three extensions of the package, in the order in which they build on each other."""
    return [_flat_plan_extension, _cpu_extension, _cuda_extension]
