"""Image features, computed once, kept on disk, read by every process through the operating system's page cache.

One safetensors file for each picture and list of crops, named by the content of both and by the encoder, so that
changed pictures, crops or weights never meet features of old ones. Stored in fp16: half of the memory and disk.

Legend of shape suffixes: C crops of a picture, P image tokens, W width of a token.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_zero.recipes.crops import Crop
from moe_zero.recipes.data import Picture, read_image
from moe_zero.recipes.encoders import ImageEncoder


class FeatureStore:
    """Features of crops by one encoder.

    Args:
        folder: the cache; ``folder/ENCODER/PICTURE-CROPS.safetensors``.
        key: `ImageEncoder.key`.
    """

    def __init__(self, folder: str | Path, key: str):
        self.folder = Path(folder) / key

    def file(self, picture: Picture, crops: Sequence[Crop]) -> Path:
        crops_key = hashlib.sha256(repr(tuple(crops)).encode()).hexdigest()
        return self.folder / f"{picture.digest[:24]}-{crops_key[:16]}.safetensors"

    def fill(
        self,
        wanted: Sequence[tuple[Picture, Sequence[Crop]]],
        encoder: Callable[[], ImageEncoder],
        device: torch.device | str = "cpu",
        share: tuple[int, int] = (0, 1),
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Compute what is missing of ``wanted`` and return how many files that were.

        Args:
            encoder: opened only if something is missing.
            share: (which, of how many): this process does every so-manieth missing file. Files appear whole or not
                at all, so processes, machines and later runs may share a folder.
            report: called with the number of files done and to do.
        """
        which, many = share
        mine = [entry for index, entry in enumerate(wanted) if index % many == which]
        missing = [(picture, crops) for picture, crops in mine if not self.file(picture, crops).exists()]
        if not missing:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        opened = encoder()
        for done, (picture, crops) in enumerate(missing, 1):
            image = read_image(picture.path)
            cut = [crop.apply(image, opened.image_size) for crop in crops]
            features = torch.cat([opened.encode(cut[start : start + 8], device) for start in range(0, len(cut), 8)])
            features_CPW = features.half()
            if not torch.isfinite(features_CPW).all():
                raise ValueError(
                    f"encoder {opened.key} gives features for {picture.path} that are not finite or exceed fp16 "
                    f"(largest {features.abs().max():.3g}); it can't be used"
                )
            file = self.file(picture, crops)
            temporary = file.with_name(f".{file.name}.{os.getpid()}")
            save_file({"features": features_CPW.contiguous()}, temporary)
            os.replace(temporary, file)
            report(done, len(missing))
        return len(missing)

    def read(self, picture: Picture, crops: Sequence[Crop], index: int) -> Tensor:
        """Features of crop ``index``: [P, W], fp16."""
        return _open(str(self.file(picture, crops))).get_slice("features")[index]


@functools.lru_cache(maxsize=512)
def _open(file: str):
    """An open file is a memory map; the limit keeps their number below what operating systems allow."""
    return safe_open(file, framework="pt")
