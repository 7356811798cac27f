"""Photographs and their captions: the default set, or a table of the user's.

A table is JSON lines or CSV with the columns ``image`` (a path, relative to the table's folder) and ``caption``, one
caption a row. An optional column ``split`` says ``train`` or ``eval``; without it the last caption of every picture
that has several is held out for evaluation. An optional column ``objects`` holds the words that name what is in the
picture, separated by semicolons (in JSON also a list); captions that a run writes are judged by them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_zero.recipes import photographs

SPLITS = ("train", "eval")


class DataError(ValueError):
    """Rows of a table that can't be used; the message names the file, the lines and what is wrong with each."""


@dataclass(frozen=True)
class Picture:
    """One picture and its captions."""

    path: Path
    name: str
    """What people are shown: the path as it was written."""
    digest: str
    """SHA-256 of the file's bytes: the picture's identity, also between files of the same content."""
    size: tuple[int, int]
    """Width and height in pixels, upright."""
    train_captions: tuple[str, ...]
    eval_captions: tuple[str, ...]
    objects: tuple[str, ...] = ()
    """Words that name what it shows, as far as the data say."""

    @property
    def held_out_captions(self) -> bool:
        """Whether the evaluation captions are wordings that training does not see."""
        return not set(self.eval_captions) & set(self.train_captions)


@dataclass(frozen=True)
class CaptionData:
    """A data set.

    ``train`` holds the pictures with training captions, ``eval`` those with evaluation captions; mostly the same.
    """

    pictures: tuple[Picture, ...]
    skipped: tuple[str, ...] = ()
    """What was wrong with each row that was left out."""

    @property
    def train(self) -> tuple[Picture, ...]:
        return tuple(picture for picture in self.pictures if picture.train_captions)

    @property
    def eval(self) -> tuple[Picture, ...]:
        return tuple(picture for picture in self.pictures if picture.eval_captions)


@dataclass
class _Captions:
    """Captions of one picture while a table is read."""

    path: Path
    name: str
    size: tuple[int, int]
    by_split: dict[str, list[str]] = field(default_factory=lambda: {"train": [], "eval": [], "": []})
    objects: dict[str, None] = field(default_factory=dict)
    """In the order of the table, each once."""


class PictureIndex:
    """Digest and size of every picture seen before, so that an unchanged file is not decoded again.

    Kept as one JSON file; an entry counts while the file's length and time of change are the same.

    Args:
        folder: where ``pictures.json`` lies; ``None`` keeps nothing.
    """

    def __init__(self, folder: Path | None):
        self.file = None if folder is None else folder / "pictures.json"
        self.entries: dict[str, list] = {}
        if self.file is not None and self.file.exists():
            try:
                self.entries = json.loads(self.file.read_text())
            except (OSError, ValueError):
                self.entries = {}  # a half-written or foreign file: the pictures are looked at again
        self.changed = False

    def look(self, path: Path) -> tuple[str, tuple[int, int]]:
        """Digest and upright size.

        Raises:
            OSError: Pillow cannot read the file; the message says why.
        """
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        entry = self.entries.get(str(path))
        if entry is None or entry[:2] != stamp:
            content = path.read_bytes()
            image = read_image(path)
            entry = [*stamp, hashlib.sha256(content).hexdigest(), *image.size]
            self.entries[str(path)] = entry
            self.changed = True
        return entry[2], (entry[3], entry[4])

    def save(self) -> None:
        if self.file is None or not self.changed:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.entries))
        os.replace(temporary, self.file)


def read_image(path: str | Path):
    """A ``PIL.Image`` in RGB, turned upright as its EXIF data say.

    Raises:
        OSError: Pillow cannot read the file, or it is cut off.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OSError(f"{path} is no image that Pillow reads: {error}") from error


def load_data(source: str, *, skip_bad: bool = False, index: PictureIndex | None = None) -> CaptionData:
    """The data set that ``source`` names.

    Args:
        source: ``"photographs"``, or the path of a ``.jsonl`` or ``.csv`` table.
        skip_bad: leave bad rows out and list them in ``skipped``.
        index: what is known of pictures from before.

    Raises:
        FileNotFoundError: there is no such table, or scikit-image is not installed.
        DataError: bad rows (without ``skip_bad``), a table without usable rows, or without the two columns.
    """
    index = index or PictureIndex(None)
    data = _default(index) if source == "photographs" else _table(Path(source), skip_bad, index)
    index.save()
    return data


def _default(index: PictureIndex) -> CaptionData:
    folder = photographs.folder()
    pictures = []
    for name, (train, held_out) in photographs.CAPTIONS.items():
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(
                f"scikit-image's {name} is not in {folder}; the captions were written for scikit-image 0.22 to 0.26: "
                "pip install 'scikit-image<0.27'"
            )
        digest, size = index.look(path)
        pictures.append(Picture(path, path.stem, digest, size, train, held_out, photographs.OBJECTS[name]))
    return CaptionData(tuple(pictures))


def _table(path: Path, skip_bad: bool, index: PictureIndex) -> CaptionData:
    found: dict[str, _Captions] = {}  # by digest: two files of the same content are one picture
    bad: list[str] = []
    for line, row in _rows(path):
        where = f"{path}:{line}"
        try:
            if isinstance(row, str):
                raise DataError(row)
            caption, split, image = row.get("caption"), row.get("split") or "", row.get("image")
            if not isinstance(image, str) or not image.strip():
                raise DataError(f"image is {image!r}; it must be the path of a picture")
            if not isinstance(caption, str) or not caption.strip():
                raise DataError(f"caption is {caption!r}; it must be a sentence")
            if split not in (*SPLITS, ""):
                raise DataError(f"split is {split!r}; it must be train or eval")
            objects = _objects(row.get("objects"))
            file = (path.parent / image).resolve()
            if not file.is_file():
                raise DataError(f"image {image!r} does not exist (looked for {file})")
            try:
                digest, size = index.look(file)
            except OSError as error:
                raise DataError(str(error)) from error
        except DataError as error:
            bad.append(f"{where}: {error}")
            continue
        entry = found.setdefault(digest, _Captions(file, image, size))
        entry.objects |= dict.fromkeys(objects)
        captions = entry.by_split[split]
        caption = " ".join(caption.split())
        if caption not in captions:
            captions.append(caption)
    if bad and not skip_bad:
        more = f"\n... and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise DataError("\n".join(bad[:5]) + more + "\nMend the rows, or leave them out with --skip-bad.")
    pictures = tuple(_picture(digest, entry) for digest, entry in found.items())
    data = CaptionData(pictures, tuple(bad))
    if len(data.train) < 2 or not data.eval:
        raise DataError(
            f"{path} has {len(data.train)} pictures to train on and {len(data.eval)} to evaluate with"
            f"{f', after {len(bad)} bad rows were left out' if bad else ''}; it needs at least 2 and 1"
        )
    return data


def _picture(digest: str, entry: _Captions) -> Picture:
    train, held_out, free = (entry.by_split[split] for split in (*SPLITS, ""))
    if not train and not held_out:  # no column split: the last of several wordings is held out
        train, held_out = (free[:-1], free[-1:]) if len(free) > 1 else (free, free)
    else:
        train = train + free
    return Picture(entry.path, entry.name, digest, entry.size, tuple(train), tuple(held_out), tuple(entry.objects))


def _objects(value: object) -> list[str]:
    words = value.split(";") if isinstance(value, str) else value or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"objects is {value!r}; it must be words separated by semicolons, such as 'cat; kitten'")
    return [word for word in map(str.strip, words) if word]


def _rows(path: Path) -> Iterator[tuple[int, dict | str]]:
    """Line number and columns of each row, or a string that says why the row can't be read."""
    if path.is_dir():
        raise DataError(f"data is the folder {str(path)!r}; it must be a .jsonl or .csv file, or 'photographs'")
    if not path.exists():
        raise FileNotFoundError(f"data is {str(path)!r}, but there is no such file")
    if path.suffix not in (".jsonl", ".csv"):
        raise DataError(f"data is {str(path)!r}; it must be a .jsonl or .csv file, or 'photographs'")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason}); save the table as UTF-8") from None
    with io.StringIO(text, newline="") as lines:
        if path.suffix == ".jsonl":
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _json_row(line)
            return
        reader = csv.DictReader(lines)
        missing = {"image", "caption"} - set(reader.fieldnames or ())
        if missing:
            raise DataError(
                f"{path}:1: no column {' and '.join(sorted(missing))}; "
                f"the columns are {', '.join(reader.fieldnames or ())}"
            )
        for row in reader:
            surplus = row.pop(None, None)  # csv's place for fields beyond the columns
            yield (
                reader.line_num,
                row if surplus is None else "more fields than columns (quote a caption that holds a comma)",
            )


def _json_row(line: str) -> dict | str:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"no valid JSON ({error})"
    return (
        row
        if isinstance(row, dict)
        else f'{line.strip()[:40]!r}; it must be an object: {{"image": ..., "caption": ...}}'
    )
