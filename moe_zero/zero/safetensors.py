"""The whole model as safetensors files under unsharded names, written and read one layer at a time.

Files are those that people know: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
`model.safetensors.index.json`. So they load into the unsharded model, and those of a pretrained model into the sharded
one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moe_zero.zero.sharded_module import ShardedModule

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INCOMING = ".incoming-"


def export_safetensors(
    directory: str | os.PathLike,
    sharded: ShardedModule,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 1 << 30,
) -> list[Path]:
    """Writes all parameters and persistent buffers, gathered a layer at a time. Collective.

    Rank 0 writes; it holds at most one file and one layer, the others one layer. Names are those of the unsharded
    module's ``state_dict``; a tied parameter is there under each of its names. Files of an earlier export are replaced
    when the new ones are complete.

    Args:
        directory: made if absent.
        dtype: of floating tensors in the files; default: that of the shards (the masters in mixed precision).
        max_file_bytes: what is larger is split into several files; a tensor is never split.

    Returns:
        the paths of the files.

    Raises (on all ranks):
        ValueError: ``max_file_bytes`` is less than 1.
        ImportError: the library safetensors is missing.
        OSError: it could not be written.
    """
    comm, error = sharded.comm, None
    writes = comm.rank == 0 and comm.replica == 0
    directory = Path(directory)
    try:
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {max_file_bytes}; it must be at least 1")
        from safetensors.torch import save_file  # an extra: only who writes such files needs it

        if writes:
            directory.mkdir(parents=True, exist_ok=True)
    except (ValueError, TypeError, ImportError, OSError) as problem:
        error = problem
    comm.agree("export_safetensors()", (str(dtype), max_file_bytes), error)

    plan = _files(sharded, dtype, max_file_bytes)
    names = _file_names(len(plan))
    waiting: dict[str, Tensor] = {}
    written = 0
    for name, value in sharded.full_tensors():
        if not writes or error is not None:
            continue  # it takes part in gathering all the same
        waiting[name] = value.to("cpu", dtype if value.is_floating_point() else None, copy=True).contiguous()
        if len(waiting) == len(plan[written]):
            try:
                save_file(waiting, directory / f"{_INCOMING}{names[written]}", metadata={"format": "pt"})
            except Exception as problem:  # the library's own for a full disk
                error = problem
            waiting.clear()
            written += 1
    if writes and error is None:
        try:
            _publish(directory, names, plan)
        except OSError as problem:
            error = problem
    comm.agree("export_safetensors()", None, error)
    return [directory / name for name in names]


def load_safetensors(
    path: str | os.PathLike, sharded: ShardedModule, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Sets parameters and buffers from safetensors files, which rank 0 reads a layer at a time. Collective. Optimizer
    states stay as they are.

    Args:
        path: a file, an index, or a folder with either; only rank 0's counts.
        strict: as in :meth:`ShardedModule.load_state_dict_full`.

    Returns:
        the names that the files lack and those that the model lacks.

    Raises (on all ranks):
        FileNotFoundError, ValueError: the files are not there, damaged, or of another model; nothing was changed.
    """
    comm, error, stored = sharded.comm, None, None
    if comm.rank == 0:
        try:
            stored = _Stored(Path(path))
        except (ValueError, OSError, ImportError) as problem:
            error = problem
    comm.agree("load_safetensors()", None, error)
    return sharded.load_state_dict_full(stored, strict)


class _Stored(Mapping[str, Tensor]):
    """Tensors of one or several files, each read when it is asked for; ``shapes`` are known before."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        if path.is_dir():
            path = path / INDEX if (path / INDEX).exists() else path / FILE
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        files = [path]
        if path.suffix == ".json":
            try:
                files = [
                    path.parent / name for name in dict.fromkeys(json.loads(path.read_text())["weight_map"].values())
                ]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is not the index of safetensors files: {error!r}") from None
        self._of: dict[str, object] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if not file.exists():
                raise FileNotFoundError(f"{path} names {file.name}, which is not beside it")
            try:
                opened = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged or no safetensors file: {error}") from None
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                self._of[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def _files(sharded: ShardedModule, dtype: torch.dtype | None, max_file_bytes: int) -> list[dict[str, int]]:
    """The names in each file, and their bytes, in the order in which layers are gathered."""
    files: list[dict[str, int]] = [{}]
    for name, shape, own in sharded.full_shapes():
        size = shape.numel() * (dtype if dtype is not None and own.is_floating_point else own).itemsize
        if files[-1] and sum(files[-1].values()) + size > max_file_bytes:
            files.append({})
        files[-1][name] = size
    return files


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _publish(directory: Path, names: list[str], plan: list[dict[str, int]]) -> None:
    for name in names:
        (directory / f"{_INCOMING}{name}").replace(directory / name)
    if len(names) > 1:
        content = {
            "metadata": {"total_size": sum(size for file in plan for size in file.values())},
            "weight_map": {name: file for file, held in zip(names, plan, strict=True) for name in held},
        }
        (directory / f"{_INCOMING}{INDEX}").write_text(json.dumps(content, indent=2) + "\n")
        (directory / f"{_INCOMING}{INDEX}").replace(directory / INDEX)
    else:
        (directory / INDEX).unlink(missing_ok=True)  # it would win over the one file
    for path in [directory / FILE, *directory.glob("model-*-of-*.safetensors"), *directory.glob(f"{_INCOMING}model*")]:
        if path.name not in names:
            path.unlink(missing_ok=True)
