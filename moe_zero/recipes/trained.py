"""Using a finished run: evaluate it again, search with it, let it write captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from moe_zero.recipes.beams import RoutedLayer, trace_beams
from moe_zero.recipes.captions import CaptionEvaluation, check_available
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.data import read_image
from moe_zero.recipes.encoders import ImageEncoder, open_encoder
from moe_zero.recipes.prepare import Prepared, build_model, encode_picture, middle, prepare
from moe_zero.recipes.processes import Processes
from moe_zero.recipes.retrieval import BATCH, Retrieval, embed_images, embed_texts, similarity
from moe_zero.recipes.tokenizer import CaptionTokenizer
from moe_zero.recipes.train import CONFIG, MODEL, autocast, evaluate, evaluate_captions


@dataclass
class TrainedRun:
    """A run's settings, its model, and the data it is used on."""

    config: TrainConfig
    model: nn.Module
    prepared: Prepared
    processes: Processes

    @classmethod
    def open(cls, folder: str | Path, processes: Processes, **changes) -> TrainedRun:
        """Load a finished run.

        Args:
            changes: fields of its `TrainConfig` to use instead, such as ``data``.

        Raises:
            FileNotFoundError: there is no run in ``folder``, or it has not come to its end.
        """
        config = _finished(Path(folder)).with_(**changes)
        prepared = prepare(config, processes, train=False)
        return cls(config, _model(config, folder, prepared.encoder_width, processes), prepared, processes)

    def retrieve(self) -> Retrieval:
        """Retrieval among the evaluation crops and captions."""
        return evaluate(self.model, self.prepared, self.processes, self.config)

    @property
    def writes_captions(self) -> bool:
        """Whether the run was trained with the objective lm."""
        return "lm" in self.config.objectives

    def caption(self) -> CaptionEvaluation:
        """A caption of every evaluation crop.

        Raises:
            ValueError: the run was trained without the objective lm.
            ImportError: transformers, which chooses the words, is not installed.
        """
        _check_captions(self.config)
        return evaluate_captions(self.model, self.prepared, self.processes, self.config)

    def rank_pictures(self, text: str) -> list[tuple[str, float]]:
        """Every picture for evaluation with its similarity to a sentence, the mean over its crops; best first."""
        image, owner_I = self.prepared.eval_images()
        with self._autocast():
            text_1C = embed_texts(self.model, self.prepared.tokenizer([text]), self.processes)
            image_IQC, _ = embed_images(self.model, image, len(owner_I), self.processes)
        scores_I = similarity(image_IQC, text_1C)[:, 0].cpu()
        pictures = enumerate(self.prepared.data.eval)
        return _best_first([(picture.name, scores_I[owner_I == number].mean().item()) for number, picture in pictures])

    def rank_captions(self, picture: str | Path) -> list[tuple[str, float]]:
        """Every caption of the data with its similarity to a picture from anywhere, best first."""
        captions = [text for own in self.prepared.data.pictures for text in (*own.train_captions, *own.eval_captions)]
        captions = list(dict.fromkeys(captions))
        features_1PW = encode_picture(self.config, picture)
        with self._autocast():
            text_KC = embed_texts(self.model, self.prepared.tokenizer(captions), self.processes)
            image_1QC, _ = embed_images(self.model, features_1PW.__getitem__, 1, self.processes)
        return _best_first(list(zip(captions, similarity(image_1QC, text_KC)[0].tolist(), strict=True)))

    def _autocast(self):
        return autocast(self.config, self.processes)


@dataclass
class CaptionWriter:
    """A run's model and what it takes to write captions of pictures from anywhere; the run's data are not needed."""

    config: TrainConfig
    model: nn.Module
    encoder: ImageEncoder
    tokenizer: CaptionTokenizer
    processes: Processes

    @classmethod
    def open(cls, folder: str | Path, processes: Processes) -> CaptionWriter:
        """Load a finished run.

        Raises:
            FileNotFoundError: there is no run in ``folder``, or it has not come to its end.
            ValueError: it was trained without the objective lm.
            ImportError: transformers, which chooses the words, is not installed.
        """
        config = _finished(Path(folder))
        _check_captions(config)
        encoder = open_encoder(config.encoder, config.encoder_checkpoint)
        model = _model(config, folder, encoder.shape()[1], processes)
        return cls(config, model, encoder, CaptionTokenizer(config.max_text_tokens), processes)

    def write(self, pictures: Sequence[str | Path], options) -> list[list[str]]:
        """Captions of the middle of each picture.

        Args:
            options: `moe_zero.qformer.captioning.CaptionOptions`.

        Raises:
            OSError: Pillow can't read a picture; before any caption is written.
        """
        from moe_zero.qformer.captioning import write_captions

        cut = [middle(read_image(picture), self.encoder) for picture in pictures]
        written = []
        for first in range(0, len(cut), BATCH):
            features = self.encoder.encode(cut[first : first + BATCH], self.processes.device).to(self.processes.device)
            # What runs were trained on was rounded to fp16 on its way through the cache.
            with autocast(self.config, self.processes):
                written += write_captions(
                    self.model,
                    features.half().float(),
                    options,
                    start_id=self.tokenizer.dec_id,
                    end_id=self.tokenizer.sep_id,
                    vocab_size=len(self.tokenizer),
                )
        return [[self.tokenizer.text(ids) for ids in captions] for captions in written]


def trace_pictures(
    folder: str | Path, pictures: Sequence[str | Path], processes: Processes
) -> tuple[list[tuple[object, list[RoutedLayer]]], int]:
    """Pictures, each cut to its middle, with the beams of experts that they went through in a finished run, and how
    many routed experts there are.

    Raises:
        FileNotFoundError: there is no run in ``folder``, or it has not come to its end.
        ValueError: its model routes no beams.
        OSError: Pillow can't read a picture.
    """
    config = _finished(Path(folder))
    images = [read_image(picture) for picture in pictures]
    encoder = open_encoder(config.encoder, config.encoder_checkpoint)
    model = _model(config, folder, encoder.shape()[1], processes).qformer
    traced = []
    for image in images:
        cut = middle(image, encoder)
        features = encoder.encode([cut], processes.device).to(processes.device)
        traced.append((cut, trace_beams(model, features)))
    return traced, model.config.num_experts - 1


def _finished(folder: Path) -> TrainConfig:
    """The settings of the run in ``folder``, which has come to its end."""
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no run ({CONFIG} is missing); moe-zero train --out {folder} makes one")
    if not (folder / MODEL).is_file():
        raise FileNotFoundError(
            f"the run in {folder} has not come to its end ({MODEL} is missing); "
            f"moe-zero train --out {folder} --resume brings it there"
        )
    return TrainConfig.load(folder / CONFIG)


def _check_captions(config: TrainConfig) -> None:
    if "lm" not in config.objectives:
        raise ValueError(f"the run was trained for {','.join(config.objectives)}; captions need lm among --objectives")
    check_available()


def _model(config: TrainConfig, folder: str | Path, encoder_width: int, processes: Processes) -> nn.Module:
    model = build_model(config, encoder_width, initial=False)
    model.load_state_dict(load_file(Path(folder) / MODEL), assign=True)
    return model.eval().to(processes.device)


def _best_first(scored: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(scored, key=lambda entry: -entry[1])
