"""A small data set of made pictures, and the settings of a run that takes seconds."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WORDS = ("red", "green", "blue", "yellow", "purple")
COLOURS = ((220, 40, 40), (40, 200, 60), (40, 60, 220), (230, 220, 50), (150, 40, 180))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """One feature cache for all tests of a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> Path:
    """captions.jsonl with five coloured pictures, three captions each."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    rows = []
    for number, (word, colour) in enumerate(zip(WORDS, COLOURS, strict=True)):
        pixels = np.array(colour) + draw.integers(-30, 30, (90, 120 + 5 * number, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{word}.png")
        for caption in (f"a {word} wall", f"something painted {word}", f"plain {word} colour"):
            rows.append({"image": f"{word}.png", "caption": caption})
    file = folder / "captions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def tiny_settings(cache, table) -> dict:
    """Settings of a run that takes seconds, on one thread; all but its folder."""
    return {
        "data": str(table),
        "cache": str(cache),
        "train_crops": 2,
        "eval_crops": 1,
        "max_text_tokens": 8,
        "num_query_tokens": 4,
        "num_hidden_layers": 2,
        "embed_dim": 32,
        "init": "random",
        "steps": 4,
        "batch_size": 4,
        "lr": 1e-4,
        "warmup_steps": 1,
        "checkpoint_every": 2,
        "threads": 1,
        "device": "cpu",
    }


@pytest.fixture
def tiny(tmp_path, tiny_settings):
    """A function of changes to `tiny_settings`."""
    from moe_zero.recipes.config import TrainConfig

    return lambda **changes: TrainConfig(**{"out": str(tmp_path / "run"), **tiny_settings, **changes})
