"""Which part of a picture is seen when: crops for training, and others, fixed before them, for evaluation.

Both are functions of the picture's content and the seed alone, so every process and every later run draws the same.
The evaluation crops are drawn first. A training crop is then drawn again until it shares less than `MAX_OVERLAP` of
its area (intersection over union) with every evaluation crop, so no evaluation crop is, or nearly is, trained on.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MAX_OVERLAP = 0.7
TRAIN_AREA = (0.3, 1.0)
EVAL_AREA = (0.4, 0.8)
RATIO = 4 / 3
TRIES = 200


@dataclass(frozen=True)
class Crop:
    """A rectangle of a picture in pixels, and how it is changed on the way."""

    left: int
    top: int
    right: int
    bottom: int
    flip: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0

    def apply(self, image, size: int):
        """The crop of a ``PIL.Image`` as ``size`` x ``size`` pixels."""
        from PIL import Image, ImageEnhance

        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(self.left, self.top, self.right, self.bottom))
        if self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for enhance, factor in (
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
            (ImageEnhance.Color, self.saturation),
        ):
            if factor != 1.0:
                image = enhance(image).enhance(factor)
        return image


def centre(size: tuple[int, int]) -> Crop:
    """The largest square in the middle: what a picture given on the command line is seen through."""
    width, height = size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return Crop(left, top, left + side, top + side)


def overlap(a: Crop, b: Crop) -> float:
    """Intersection over union of two rectangles, from 0 to 1."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (_area(a) + _area(b) - shared)


def evaluation_crops(digest: str, size: tuple[int, int], count: int, seed: int) -> tuple[Crop, ...]:
    """``count`` crops without any other change. They do not depend on how training crops are drawn."""
    draw = random.Random(f"eval {seed} {digest}")
    return tuple(_rectangle(draw, size, EVAL_AREA) for _ in range(count))


def training_crops(
    digest: str, size: tuple[int, int], count: int, seed: int, avoid: tuple[Crop, ...]
) -> tuple[Crop, ...]:
    """``count`` crops, flipped half of the time, with brightness, contrast and saturation changed by up to 30 %.

    Args:
        avoid: the picture's evaluation crops. Where `TRIES` draws all overlap them too much (a picture of a few
            pixels), the draw that overlaps least is taken.
    """
    draw = random.Random(f"train {seed} {digest}")
    crops = []
    for _ in range(count):
        best, best_overlap = None, math.inf
        for _ in range(TRIES):
            crop = _rectangle(draw, size, TRAIN_AREA)
            worst = max((overlap(crop, other) for other in avoid), default=0.0)
            if worst < best_overlap:
                best, best_overlap = crop, worst
            if worst < MAX_OVERLAP:
                break
        brightness, contrast, saturation = (1 + draw.uniform(-0.3, 0.3) for _ in range(3))
        crops.append(
            Crop(best.left, best.top, best.right, best.bottom, draw.random() < 0.5, brightness, contrast, saturation)
        )
    return tuple(crops)


def _area(crop: Crop) -> int:
    return (crop.right - crop.left) * (crop.bottom - crop.top)


def _rectangle(draw: random.Random, size: tuple[int, int], area: tuple[float, float]) -> Crop:
    """A share of the picture's area and a ratio of the sides, uniform in the area and in the logarithm of the
    ratio.
    """
    width, height = size
    share = draw.uniform(*area) * width * height
    ratio = math.exp(draw.uniform(-math.log(RATIO), math.log(RATIO))) * width / height
    crop_width = max(1, min(width, round(math.sqrt(share * ratio))))
    crop_height = max(1, min(height, round(math.sqrt(share / ratio))))
    left, top = draw.randint(0, width - crop_width), draw.randint(0, height - crop_height)
    return Crop(left, top, left + crop_width, top + crop_height)
