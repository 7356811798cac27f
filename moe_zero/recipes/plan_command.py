"""The command ``moe-zero plan``: memory and traffic of training a Q-Former, before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml

from moe_zero.qformer import QFormerConfig, QFormerLayer, QFormerModel
from moe_zero.qformer.checkpoint import find_configuration
from moe_zero.qformer.layouts import locate
from moe_zero.qformer.weight_files import open_weights
from moe_zero.recipes.config import PRESETS, TrainConfig
from moe_zero.zero.plan import OPTIMIZERS, Estimate, activation_bytes, estimate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 1 << 20


def plan(
    model: Annotated[str, typer.Argument(help="seed, small, a YAML or JSON configuration, or a checkpoint.")],
    ranks: Annotated[int, typer.Option(help="Processes that share the model.", min=1)] = 2,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)} (momentum: SGD with momentum).")] = "adamw",
    dtype: Annotated[str, typer.Option(help="What products are computed in; weights are kept in fp32.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Samples of one rank in a step.", min=1)] = 2,
    image_tokens: Annotated[int, typer.Option(help="Tokens of an image.", min=1)] = 257,
    text_tokens: Annotated[int, typer.Option(help="Tokens of a text.", min=1)] = 13,
    reshard: Annotated[bool, typer.Option(help="ZeRO-3: free parameters between forward and backward.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes, as JSON.")] = False,
) -> None:
    """Say what each rank holds and sends when a Q-Former is trained, with DDP and the three stages of ZeRO.

    Nothing is launched and no weights are read. Activations are an estimate: what autograd saves in one forward. The
    rest is counted, and the process itself measured.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer is {optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}")
    config = read_config(model)
    estimates = plan_qformer(
        config, ranks, optimizer, DTYPES[dtype], batch, image_tokens, text_tokens, reshard_after_forward=reshard
    )
    if as_json:
        print(json.dumps([each.to_dict() for each in estimates], indent=2))
    else:
        millions = count_parameters(config) / 1e6
        _print_table(
            f"{model}: {millions:.1f} M parameters, {optimizer}, {dtype}, ranks: {ranks}, samples on each: {batch}",
            estimates,
        )


def read_config(source: str) -> QFormerConfig:
    """The configuration that a preset's name, a file of settings or a checkpoint stands for.

    Raises:
        FileNotFoundError: it is none of these.
        ValueError: a setting is wrong or unknown.
    """
    if source in PRESETS:
        return QFormerConfig(**PRESETS[source])
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{source!r} is no preset ({', '.join(PRESETS)}), and there is no such file or folder")
    settings = None
    if path.suffix in (".yaml", ".yml", ".json") and not path.name.endswith(".index.json"):
        settings = _read_settings(path)
    elif path.is_dir() and (path / "config.yaml").exists():  # of a run of `moe-zero train`
        settings = _read_settings(path / "config.yaml")
    if settings is not None:
        return settings
    opened = open_weights(path)
    return find_configuration(opened, locate(opened.weights), {})[0]


def _read_settings(path: Path) -> QFormerConfig:
    try:
        settings = yaml.safe_load(path.read_text())  # of which JSON is a part
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}; it must hold settings by name")
    if "preset" in settings:
        return TrainConfig.load(path).qformer(QFormerConfig.encoder_width)
    settings.pop("model_type", None)
    return QFormerConfig.from_dict(settings)


def plan_qformer(
    config: QFormerConfig,
    ranks: int,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    image_tokens: int = 257,
    text_tokens: int = 13,
    layers: Sequence[type | str] = (QFormerLayer,),
    **options,
) -> list[Estimate]:
    """`moe_zero.zero.plan.estimate` for a Q-Former whose weights are fp32, with ``batch`` samples on each rank."""
    from torch._subclasses import FakeTensorMode

    def run(model: QFormerModel) -> torch.Tensor:
        image_BPW = torch.zeros(batch, image_tokens, config.encoder_width, dtype=dtype)
        text_BT = torch.ones(batch, text_tokens, dtype=torch.long) if config.use_text else None
        return model(image_features=image_BPW, input_ids=text_BT).last_hidden_state

    with FakeTensorMode():
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            activations = activation_bytes(QFormerModel(config), layers, run)
        finally:
            torch.set_default_dtype(before)
        compute_dtype = None if dtype == torch.float32 else dtype
        return estimate(
            QFormerModel(config),
            layers,
            ranks,
            optimizer=optimizer,
            compute_dtype=compute_dtype,
            activations=activations,
            **options,
        )


def count_parameters(config: QFormerConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in QFormerModel(config).parameters())


def _print_table(title: str, estimates: list[Estimate]) -> None:
    from rich.console import Console
    from rich.table import Table

    copies = f"{estimates[-1].saving / MIB:,.0f} MiB"
    table = Table(title=title, caption=(
        "MiB on each rank. Activations are an estimate. Buffers are layers and messages that come and go. Not all "
        "of it exists at once; the peak does. Gathered, reduced: payload of a step; sent: by each rank. "
        f"While a checkpoint is written in the background, its copies take {copies} more (ZeRO-3)."
    ))  # fmt: skip
    table.add_column("")
    for each in estimates:
        table.add_column(each.strategy, justify="right")
    for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "process", "peak"):
        table.add_row(name, *(f"{getattr(each, name) / MIB:,.0f}" for each in estimates))
    table.add_row("peak at", *(each.at for each in estimates), end_section=True)
    table.add_row("gathered", *(f"{each.all_gather / MIB:,.0f}" for each in estimates))
    table.add_row("reduced", *(f"{(each.reduce_scatter + each.all_reduce) / MIB:,.0f}" for each in estimates))
    table.add_row("sent", *(f"{each.sent / MIB:,.0f}" for each in estimates))
    Console().print(table)
