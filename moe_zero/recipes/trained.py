"""Using a finished run: evaluate it again, or search with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.prepare import Prepared, build_model, encode_picture, prepare
from moe_zero.recipes.processes import Processes
from moe_zero.recipes.retrieval import Retrieval, embed_images, embed_texts, similarity
from moe_zero.recipes.train import CONFIG, MODEL, autocast, evaluate


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
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{folder} holds no run ({CONFIG} is missing); moe-zero train --out {folder} makes one"
            )
        if not (folder / MODEL).is_file():
            raise FileNotFoundError(
                f"the run in {folder} has not come to its end ({MODEL} is missing); "
                f"moe-zero train --out {folder} --resume brings it there"
            )
        config = TrainConfig.load(folder / CONFIG).with_(**changes)
        prepared = prepare(config, processes, train=False)
        model = build_model(config, prepared.encoder_width, initial=False)
        model.load_state_dict(load_file(folder / MODEL), assign=True)
        return cls(config, model.eval().to(processes.device), prepared, processes)

    def retrieve(self) -> Retrieval:
        """Retrieval among the evaluation crops and captions."""
        return evaluate(self.model, self.prepared, self.processes, self.config)

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


def _best_first(scored: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(scored, key=lambda entry: -entry[1])
