"""From options to what training and evaluation need: pictures, crops, features, tokenizer, model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from moe_zero.qformer.objectives import QFormerPretraining
from moe_zero.recipes.batches import BatchSource
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.crops import Crop, centre, evaluation_crops, training_crops
from moe_zero.recipes.data import CaptionData, PictureIndex, load_data, read_image
from moe_zero.recipes.encoders import ImageEncoder, open_encoder
from moe_zero.recipes.features import FeatureStore
from moe_zero.recipes.processes import Processes
from moe_zero.recipes.tokenizer import CaptionTokenizer, minilm_folder
from moe_zero.recipes.warm_start import copy_bert


@dataclass
class Prepared:
    """Data with its features on disk."""

    config: TrainConfig
    data: CaptionData
    train_crops: list[tuple[Crop, ...]]
    """Of each picture of ``data.train``."""
    eval_crops: list[tuple[Crop, ...]]
    """Of each picture of ``data.eval``."""
    store: FeatureStore
    tokenizer: CaptionTokenizer
    encoder_width: int
    seconds: float

    def batches(self) -> BatchSource:
        config = self.config
        return BatchSource(
            self.data.train, self.train_crops, self.store, self.tokenizer, config.batch_size, config.seed
        )

    def eval_images(self) -> tuple[Callable[[int], Tensor], Tensor]:
        """Crop number to features [P, W] in fp32, and which picture of ``data.eval`` each crop is of."""
        crops = [(picture, index) for picture, own in enumerate(self.eval_crops) for index in range(len(own))]

        def read(number: int) -> Tensor:
            picture, index = crops[number]
            return self.store.read(self.data.eval[picture], self.eval_crops[picture], index).float()

        return read, torch.tensor([picture for picture, _ in crops])

    def eval_texts(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Ids and mask [K, T] of the evaluation captions, and which picture of ``data.eval`` each is of."""
        captions = [(text, picture) for picture, own in enumerate(self.data.eval) for text in own.eval_captions]
        return self.tokenizer([text for text, _ in captions]), torch.tensor([picture for _, picture in captions])


def load_data_once(config: TrainConfig) -> CaptionData:
    """The data, with its pictures looked at only where that was not done before."""
    return load_data(config.data, skip_bad=config.skip_bad, index=PictureIndex(Path(config.cache)))


def prepare(
    config: TrainConfig, processes: Processes, *, train: bool = True, counting: Callable | None = None
) -> Prepared:
    """Load the data and compute the features that are missing, each process of a machine its share of them.

    Args:
        train: also the training crops, not only those for evaluation.
        counting: text to a function of (done, total).
    """
    start = time.perf_counter()
    # The first process of a machine looks at new pictures, the others find them in the index.
    if processes.local_rank == 0:
        data = load_data_once(config)
    processes.barrier()
    if processes.local_rank != 0:
        data = load_data_once(config)
    encoder = open_encoder(config.encoder, config.encoder_checkpoint)
    store = FeatureStore(config.cache, encoder.key)
    held_out = {
        picture.digest: evaluation_crops(picture.digest, picture.size, config.eval_crops, config.seed)
        for picture in data.pictures
    }
    eval_crops = [held_out[picture.digest] for picture in data.eval]
    train_crops = [
        training_crops(picture.digest, picture.size, config.train_crops, config.seed, held_out[picture.digest])
        for picture in data.train
    ]
    wanted = [*zip(data.eval, eval_crops, strict=True), *(zip(data.train, train_crops, strict=True) if train else ())]
    store.fill(
        wanted,
        lambda: encoder,
        processes.device,
        (processes.local_rank, processes.local_world_size),
        **({"report": counting("image features")} if counting else {}),
    )
    processes.barrier()
    width = store.read(*wanted[0], 0).shape[1]
    tokenizer = CaptionTokenizer(config.max_text_tokens)
    return Prepared(config, data, train_crops, eval_crops, store, tokenizer, width, time.perf_counter() - start)


def build_model(config: TrainConfig, encoder_width: int, *, initial: bool = True) -> QFormerPretraining:
    """The model that ``config`` describes, the same on every process.

    Args:
        initial: with its initial weights: drawn from the seed, and MiniLM's where ``init`` says so. Without, on the
            meta device.
    """
    qformer = config.qformer(encoder_width)
    heads = {"embed_dim": config.embed_dim, "objectives": config.objectives, "gate_weight": config.gate_weight}
    if not initial:
        with torch.device("meta"):
            return QFormerPretraining(qformer, **heads)
    torch.manual_seed(config.seed)
    model = QFormerPretraining(qformer, **heads)
    if config.init == "minilm" or (config.init == "auto" and config.preset == "small"):
        copy_bert(model.qformer, minilm_folder() / "model.safetensors")
    return model


def middle(image: Image.Image, encoder: ImageEncoder) -> Image.Image:
    """The middle of a picture that is not in the data, as the encoder takes it."""
    return centre(image.size).apply(image, encoder.image_size)


def encode_picture(config: TrainConfig, path: str | Path) -> Tensor:
    """Features of the middle of a picture that is not in the data: [1, P, W]."""
    image = read_image(path)
    encoder = open_encoder(config.encoder, config.encoder_checkpoint)
    return encoder.encode([middle(image, encoder)])
