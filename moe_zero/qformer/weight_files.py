"""Weights where they are kept: safetensors and torch files, one or sharded, folders of them, and what is in memory.

Nothing here knows a name of a weight. Tensors are read when they are asked for, so that a Q-Former can be taken out of
a checkpoint of many gigabytes; torch files are read with ``weights_only``.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch files of before torch 1.6 begin with; later ones are zip files."""
FOLDER_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""What a folder is searched for, the first that is there; else for the only weight file in it."""
WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts keep the state dict in a torch file."""
CONFIG_KEY = "moe_zero_config"
"""Where our own configuration is kept inside of a weight file: a metadata key of safetensors, a key of a torch file."""


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]):
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class WeightSource:
    """Weights and what is recorded beside them."""

    where: str
    """For messages: a path, or what the object in memory is."""
    weights: Mapping[str, Tensor]
    config: Mapping | None = None
    """``config.json`` beside the file, or the configuration of a model in memory."""
    config_where: str = "config.json"
    embedded: Mapping | None = None
    """Our own configuration from inside the file."""


def open_weights(source: str | os.PathLike | nn.Module | Mapping) -> WeightSource:
    """Find the weights of ``source``.

    Args:
        source: a ``.safetensors`` or torch file; the ``.index.json`` of a sharded one; a folder that holds one of
            these; a module (with its ``config``, where it has one); or a state dict. The state dict of a torch file or
            of a mapping may be under one of the keys ``model``, ``state_dict``, ``model_state_dict``, ``module``.

    Raises:
        FileNotFoundError: nothing is there, or a shard of an index is not.
        ValueError: the file is of no such kind, damaged, or holds no tensors; named with its path.
    """
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        to_dict = getattr(config, "to_dict", None)
        return WeightSource(
            f"module {type(source).__name__}", source.state_dict(), to_dict() if to_dict else None, "its config"
        )
    if isinstance(source, Mapping):
        return WeightSource("a state dict", _state_dict(source, "the state dict"), embedded=source.get(CONFIG_KEY))
    path = Path(source)
    if path.is_dir():
        path = _weight_file(path)
    elif not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: there is no such file or folder")
    weights, embedded = _read_index(path) if path.suffix == ".json" else _read_file(path)
    config = path.parent / "config.json"
    # A file with a configuration of its own may lie beside the config.json of another model.
    is_beside = config.is_file() and (embedded is None or path.name in FOLDER_FILES)
    return WeightSource(str(path), weights, _read_json(config) if is_beside else None, embedded=embedded)


def check_target(target: Path) -> None:
    """Refuse, before any work is done, what `write_weights` can't write or what is hardly meant.

    Raises:
        ValueError: the name looks like that of a file of another kind.
        NotADirectoryError, PermissionError: no file can be made there.
    """
    if re.fullmatch(r"\.[A-Za-z]{1,8}", target.suffix) and target.suffix not in SUFFIXES and not target.is_dir():
        raise ValueError(
            f"target is {str(target)!r}; a weight file ends in {', '.join(SUFFIXES)}, and a folder that is to be made "
            "has no ending"
        )
    place = target if target.suffix not in SUFFIXES else target.parent
    existing = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"target is {str(target)!r}, but {str(existing)!r} is no folder")
    if target.suffix in SUFFIXES and target.is_dir():
        raise IsADirectoryError(f"target is {str(target)!r}, which is a folder; name a file in it")
    if not os.access(existing, os.W_OK):
        raise PermissionError(f"target is {str(target)!r}, but {str(existing)!r} can't be written to")


def write_weights(tensors: Mapping[str, Tensor], target: Path, config: Mapping, folder_config: Mapping) -> Path:
    """Write ``tensors`` and return the path of the file.

    A target that ends in ``.safetensors`` becomes one file; one that ends like a torch file becomes one with the
    tensors under ``model``, as LAVIS keeps them. Anything else is a folder of ``model.safetensors`` and
    ``config.json``, the latter with ``folder_config``. Every weight file holds ``config``, our own configuration, too,
    and takes its place in one step, when it is complete.
    """
    if is_folder := target.suffix not in SUFFIXES:
        folder, target = target, target / "model.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        if target.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(tensors), partial, metadata={"format": "pt", CONFIG_KEY: json.dumps(config)})
        else:
            torch.save({"model": dict(tensors), CONFIG_KEY: dict(config)}, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    if is_folder:
        (folder / "config.json").write_text(json.dumps(folder_config, indent=2, sort_keys=True) + "\n")
    return target


def _weight_file(folder: Path) -> Path:
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise FileNotFoundError(
            f"{folder} has no {' or '.join(FOLDER_FILES)}, nor one weight file alone: found {found}"
        )
    return files[0]


def _read_index(path: Path) -> tuple[Weights, Mapping | None]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ValueError(f"{path} is not the index of a sharded checkpoint: it has no weight_map")
    shards = {}
    for name in sorted(set(weight_map.values())):
        if not (path.parent / name).is_file():
            raise FileNotFoundError(f"{path} names the shard {name}, which is not beside it")
        shards[name] = _read_file(path.parent / name)[0]
    lacking = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if lacking:
        raise ValueError(f"{path} promises tensors that its shards lack: {', '.join(lacking)}")
    return Weights({name: _reader(shards[shard], name) for name, shard in weight_map.items()}), None


def _read_file(path: Path) -> tuple[Mapping[str, Tensor], Mapping | None]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        return _read_torch(path)
    raise ValueError(f"{path} is no weight file; those end in {', '.join(SUFFIXES)} or .index.json")


def _read_safetensors(path: Path) -> tuple[Weights, Mapping | None]:
    from safetensors import SafetensorError, safe_open  # an extra: only who reads such files needs it

    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    metadata = file.metadata() or {}
    embedded = json.loads(metadata[CONFIG_KEY]) if CONFIG_KEY in metadata else None
    readers = {name: _safetensors_reader(file, name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    return Weights(readers), embedded


def _read_torch(path: Path) -> tuple[Mapping[str, Tensor], Mapping | None]:
    with open(path, "rb") as file:
        is_legacy = file.read(len(LEGACY_START)) == LEGACY_START
    if not is_legacy and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a torch file, or is damaged")
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of before torch 1.6 can't be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsupported = re.search(r"Unsupported (?:global|class|operand)[^.]*|GLOBAL \S+", str(error))
        raise ValueError(
            f"{path} holds more than tensors and plain values, and reading that could run any code; save its state "
            "dict alone (torch.save(model.state_dict(), ...)) where you trust it. What was in the way: "
            f"{unsupported[0] if unsupported else _first_line(error)}"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a torch file, or is damaged: {_first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a state dict")
    return _state_dict(content, str(path)), content.get(CONFIG_KEY)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _state_dict(content: Mapping, where: str) -> dict[str, Tensor]:
    """The tensors of ``content``, or of the mapping that it keeps them in."""
    for key in WRAPPERS:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{where} holds no tensors; its keys are {', '.join(map(str, list(content)[:10])) or 'none'}")
    return tensors


def _read_json(path: Path) -> Mapping:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold an object")
    return content


def _reader(weights: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: weights[name]


def _safetensors_reader(file, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)
