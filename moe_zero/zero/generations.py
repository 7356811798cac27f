"""A checkpoint's folder on disk: generations, each complete or absent, and a pointer to the latest."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

LATEST = "latest"
MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_INCOMING = ".incoming-"


def find_checkpoint(directory: str | os.PathLike) -> Path:
    """The folder of the generation that ``load_checkpoint(directory)`` would read. ``FileNotFoundError`` if there is
    none."""
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        return directory
    try:
        name = (directory / LATEST).read_text().strip()
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} holds no checkpoint: it has no file {LATEST!r}") from None
    if not (directory / name / MANIFEST).exists():
        raise FileNotFoundError(f"{directory / LATEST} names {name!r}, but there is no {directory / name / MANIFEST}")
    return directory / name


def incoming_folder(directory: Path, name: str) -> Path:
    """Where a generation is written before it is complete."""
    return directory / f"{_INCOMING}{name}"


def prepare(directory: Path) -> str:
    """The name of the next generation."""
    directory.mkdir(parents=True, exist_ok=True)
    for left_over in directory.glob(f"{_INCOMING}*"):
        # A folder, or the pointer, where a process was killed before it renamed it.
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    numbers = [int(path.name.removeprefix(_PREFIX)) for path in directory.glob(f"{_PREFIX}*")]
    return f"{_PREFIX}{max(numbers, default=0) + 1:08d}"


def publish(directory: Path, name: str, sums: dict[str, list[int]], keep: int) -> None:
    """Makes a generation whose files are complete the latest one, durably, and removes all but ``keep``."""
    incoming = incoming_folder(directory, name)
    metadata = incoming / ".metadata"
    sums = {**sums, metadata.name: [metadata.stat().st_size, checksum(metadata)]}
    _write_durably(incoming / MANIFEST, json.dumps({"files": sums}, indent=1))
    _sync(incoming)
    incoming.rename(directory / name)
    _write_durably(directory / f"{_INCOMING}{LATEST}", name)
    (directory / f"{_INCOMING}{LATEST}").rename(directory / LATEST)
    _sync(directory)
    for old in sorted(directory.glob(f"{_PREFIX}*"))[:-keep]:
        shutil.rmtree(old)


def verify(path: Path, rank: int, world_size: int) -> None:
    """Compares sizes and checksums; each rank reads its share of the files."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error!r}") from None
    for name, (size, written) in sorted(files.items())[rank::world_size]:
        file = path / name
        if not file.exists():
            raise ValueError(f"{file} is missing; the checkpoint is damaged")
        if file.stat().st_size != size:
            raise ValueError(f"{file} is damaged: it has {file.stat().st_size} bytes, {size} were written")
        if checksum(file) != written:
            raise ValueError(f"{file} is damaged: its checksum is not the one that was written")


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Makes renames in a folder durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
