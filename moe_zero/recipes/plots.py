"""Pictures of a run: how the losses went, what resembles what, and who took which expert."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from moe_zero.recipes.retrieval import Retrieval

SHOWN = 40
"""Pictures of the data that a plot has room for; the first ones are shown."""
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#db2777", "#0891b2", "#65a30d")
GREY = "#6b7280"
STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "legend.frameon": False,
}
# Figures are made without pyplot and styled inside a context: no window, and no setting of the caller's is touched.


@rc_context(STYLE)
def draw_losses(metrics: Path, file: Path) -> None:
    """Losses, accuracies, and learning rate with gradient norm over the steps, from a run's ``metrics.jsonl``."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    ((losses, accuracy), (rate, norm)) = figure.subplots(2, 2, sharex=True)

    def lines(axis, names: dict[str, str]) -> None:
        for colour, (key, label) in zip(COLOURS, names.items(), strict=False):
            values = [row[key] for row in rows]
            axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            axis.plot(steps, _smooth(values), color=colour, label=label, linewidth=2)

    matching = {"itm": "matching"} if "itm" in rows[0] else {}
    lines(losses, {"loss": "total", "itc": "contrastive", **matching, "gate": "gate (before its weight)"})
    losses.set(title="Losses", ylim=(0, None))
    losses.legend()
    lines(accuracy, {f"{key}_accuracy": label for key, label in {"itc": "contrastive", **matching}.items()})
    accuracy.set(title="Accuracy in the batch", ylim=(0, 1.03))
    accuracy.legend(loc="lower right")
    rate.plot(steps, [row["lr"] for row in rows], color=GREY, linewidth=2)
    rate.set(title="Learning rate", xlabel="step", ylim=(0, None))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    norm.plot(steps, [row["grad_norm"] for row in rows], color=GREY, linewidth=1.5)
    norm.set(title="Gradient norm, before clipping", xlabel="step", yscale="log")
    figure.suptitle(f"{len(rows)} steps")
    figure.savefig(file, dpi=140)


@rc_context(STYLE)
def draw_similarity(retrieval: Retrieval, names: Sequence[str], file: Path) -> None:
    """Mean similarity of each picture's unseen crops (rows) with each picture's unseen captions (columns)."""
    pictures = retrieval.image_owner_I.unique()[:SHOWN].tolist()
    captioned = [picture for picture in pictures if bool((retrieval.text_owner_K == picture).any())]
    mean = torch.tensor(
        [
            [
                retrieval.scores_IK[retrieval.image_owner_I == row][:, retrieval.text_owner_K == column].mean()
                for column in captioned
            ]
            for row in pictures
        ]
    )
    side = 2.6 + 0.3 * len(pictures)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(mean.numpy(), cmap="magma", vmin=mean.min(), vmax=mean.max())
    axis.set_xticks(range(len(captioned)), [names[picture] for picture in captioned], rotation=60, ha="right")
    axis.set_yticks(range(len(pictures)), [names[picture] for picture in pictures])
    best = mean.argmax(1).tolist()
    axis.scatter(best, range(len(pictures)), marker="o", s=26, facecolors="none", edgecolors="#22d3ee", linewidths=1.6)
    axis.set(
        title="Cosine similarity of unseen crops and unseen captions\n(circle: best caption of each picture)",
        xlabel="captions of",
        ylabel="crops of",
    )
    axis.grid(False)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(file, dpi=140)


@rc_context(STYLE)
def draw_experts(
    routes_IL: Tensor,
    owner_I: Tensor,
    thumbnails: Sequence,
    names: Sequence[str],
    layers: Sequence[int],
    routed: int,
    file: Path,
) -> None:
    """Which routed expert each picture's crops took, in every routed layer.

    Args:
        routes_IL: experts that each crop took.
        owner_I: the picture that each crop is of.
        thumbnails: a ``PIL.Image`` of each picture.
        layers: numbers of the routed layers.
        routed: number of routed experts.
    """
    pictures = owner_I.unique()[:SHOWN].tolist()
    height = 1.6 + 0.5 * len(pictures)
    figure = Figure(figsize=(2.6 + 1.9 * len(layers), height), layout="constrained")
    axes = figure.subplots(1, len(layers) + 1, width_ratios=[0.24] + [1] * len(layers), sharey=True)
    for row, picture in enumerate(pictures):
        axes[0].imshow(np.asarray(_middle(thumbnails[picture])), extent=(0, 1, row + 0.45, row - 0.45), aspect="auto")
    axes[0].set(xlim=(0, 1), ylim=(len(pictures) - 0.5, -0.5), xticks=[])
    axes[0].set_yticks(range(len(pictures)), [names[picture] for picture in pictures])
    axes[0].grid(False)
    axes[0].spines[:].set_visible(False)
    for column, (axis, layer) in enumerate(zip(axes[1:], layers, strict=True)):
        left = torch.zeros(len(pictures))
        for expert in range(routed):
            share = torch.tensor(
                [(routes_IL[owner_I == picture, column] == expert).double().mean() for picture in pictures]
            )
            axis.barh(
                range(len(pictures)),
                share,
                left=left,
                height=0.8,
                color=COLOURS[expert % len(COLOURS)],
                label=f"{expert}",
            )
            left = left + share
        load = torch.bincount(routes_IL[:, column], minlength=routed) / len(routes_IL)
        axis.set(xlim=(0, 1), xlabel="load " + " / ".join(f"{value:.0%}" for value in load.tolist()), xticks=[])
        axis.set_title(f"layer {layer}")
        axis.grid(False)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.suptitle("Routed expert that the unseen crops of each picture took")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(routed, 8), title="expert", frameon=False)
    figure.savefig(file, dpi=140)


def _middle(image, ratio: float = 1.0):
    """The largest part in the middle whose sides have that ratio, the one that a row of the plot shows undistorted."""
    width, height = image.size
    new_width, new_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - new_width) // 2, (height - new_height) // 2
    return image.crop((left, top, left + new_width, top + new_height))


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential mean without the bias of its start."""
    smooth, total, out = 0.0, 0.0, []
    for value in values:
        smooth, total = weight * smooth + (1 - weight) * value, weight * total + (1 - weight)
        out.append(smooth / total)
    return out
