"""Pictures of a run: how the losses went, what resembles what, and who took which expert."""

from __future__ import annotations

import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from moe_zero.recipes.beams import RoutedLayer
from moe_zero.recipes.captions import CaptionEvaluation
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

    others = {key: label for key, label in {"itm": "matching", "lm": "captions"}.items() if key in rows[0]}
    lines(losses, {"loss": "total", "itc": "contrastive", **others, "gate": "gate (before its weight)"})
    losses.set(title="Losses", ylim=(0, None))
    losses.legend()
    lines(accuracy, {f"{key}_accuracy": label for key, label in {"itc": "contrastive", **others}.items()})
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


@rc_context(STYLE)
def draw_routing(metrics: Path, layers: Sequence[int], file: Path) -> None:
    """Load of every routed expert in training, layer by layer, and its entropy, from a run's ``metrics.jsonl``."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows]
    loads_SLR = np.array([row["expert_load"] for row in rows])
    figure = Figure(figsize=(3.2 * len(layers) + 3.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(layers) + 1)
    for place, (axis, layer) in enumerate(zip(axes, layers, strict=False)):
        for expert in range(loads_SLR.shape[2]):
            colour = COLOURS[expert % len(COLOURS)]
            values = loads_SLR[:, place, expert].tolist()
            axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            axis.plot(steps, _smooth(values), color=colour, linewidth=2, label=f"{expert}")
        axis.axhline(1 / loads_SLR.shape[2], color=GREY, linewidth=1, linestyle=":")
        axis.set(title=f"layer {layer}: load", xlabel="step", ylim=(-0.03, 1.03))
    for place, layer in enumerate(layers):
        entropy = [row["load_entropy"][place] for row in rows]
        axes[-1].plot(steps, _smooth(entropy), linewidth=2, color=COLOURS[-1 - place % len(COLOURS)], label=f"{layer}")
    axes[-1].set(title="entropy of the load (1: even)", xlabel="step", ylim=(0, 1.03))
    legend = {"title_fontsize": 9, "fontsize": 9}
    figure.legend(*axes[0].get_legend_handles_labels(), title="expert", loc="outside left center", **legend)
    figure.legend(*axes[-1].get_legend_handles_labels(), title="layer", loc="outside right center", **legend)
    figure.savefig(file, dpi=140)


@rc_context(STYLE)
def draw_captions(written: CaptionEvaluation, thumbnails: Sequence, file: Path) -> None:
    """Every picture with the caption of most of its unseen crops; a mark says whether it names the object.

    Args:
        thumbnails: a ``PIL.Image`` of each of the first pictures, which are shown.
    """
    pictures = written.pictures[: len(thumbnails)]
    columns = min(6, len(pictures))
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, picture, image in zip(axes.flat, pictures, thumbnails, strict=False):
        axis.imshow(np.asarray(_middle(image)))
        lines = textwrap.wrap(picture.usual, 30)[:4] or ["(nothing)"]
        colour = "black"
        if picture.accepted:
            lines.append(f"right in {picture.right} of {len(picture.captions)} crops")
            colour = "#047857" if picture.is_named else "#b91c1c"
        axis.set_title("\n".join(lines), fontsize=8, color=colour, y=-0.05, va="top", parse_math=False)
    figure.suptitle("Captions of unseen crops", fontsize=11)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # captions may be of any script; boxes stand for others
        figure.savefig(file, dpi=110)


@rc_context(STYLE)
def draw_beams(pictures: Sequence[tuple[object, Sequence[RoutedLayer]]], num_routed: int, file: Path) -> None:
    """The beams of experts of some pictures: a tree for each, from left to right through the routed layers.

    A circle is a beam that a layer kept, at the height of the expert it took; its area is its score. Thin lines are
    the ways that were tried and dropped, thick ones the way of the beam that was chosen in the end.

    Args:
        pictures: a ``PIL.Image`` and the beams of each.
        num_routed: number of routed experts; the universal one is drawn below them.
    """
    layers = pictures[0][1]
    width, height = 2.6 + 1.9 * len(layers), 1.0 + 0.85 * (num_routed + 1)
    figure = Figure(figsize=(width, height * len(pictures)), layout="constrained")
    rows = figure.subplots(len(pictures), 2, width_ratios=[1, 1.4 * len(layers)], squeeze=False)
    for (shown, axis), (image, layers) in zip(rows, pictures, strict=True):
        shown.imshow(np.asarray(_middle(image)))
        shown.set_axis_off()
        _draw_tree(axis, layers, num_routed)
    figure.suptitle("Beams of experts: every kept beam is tried with every routed expert, the best stay")
    figure.savefig(file, dpi=130)


def _draw_tree(axis, layers: Sequence[RoutedLayer], num_routed: int) -> None:
    spread = 0.34

    def place(column: int, beams: Sequence, number: int) -> tuple[float, float]:
        """Beams that took the same expert stand one above the other."""
        same = [other for other, beam in enumerate(beams) if beam.expert == beams[number].expert]
        return column, beams[number].expert + spread * (same.index(number) - (len(same) - 1) / 2)

    chosen, way = 0, []
    for layer in reversed(layers):
        way.append(chosen)
        chosen = layer.beams[chosen].parent
    way.reverse()
    before = [(-1.0, (num_routed - 1) / 2)]
    for column, layer in enumerate(layers):
        taken = {(beam.parent, beam.expert) for beam in layer.beams}
        for parent, (x, y) in enumerate(before):
            for expert in range(num_routed):
                if (parent, expert) not in taken:
                    axis.plot([x, column], [y, expert], color="#d1d5db", linewidth=0.8, linestyle="--", zorder=1)
        now = [place(column, layer.beams, number) for number in range(len(layer.beams))]
        for number, (beam, (x, y)) in enumerate(zip(layer.beams, now, strict=True)):
            colour = COLOURS[beam.expert % len(COLOURS)]
            x_before, y_before = before[beam.parent]
            width = 3.5 if number == way[column] else 1.2
            axis.plot([x_before, x], [y_before, y], color=colour, linewidth=width, zorder=2)
            axis.scatter([x], [y], s=60 + 240 * beam.score, color=colour, zorder=3)
            axis.annotate(f"{beam.score:.2f}", (x, y), (0, 10), textcoords="offset points", fontsize=8, ha="center")
        before = now
    universal = num_routed
    end = len(layers)
    axis.plot([-1, end - 1], [universal, universal], color=GREY, linewidth=2)
    axis.plot(
        [end - 1, end - 0.4], [before[0][1], universal / 2], color=COLOURS[layers[-1].beams[0].expert], linewidth=3.5
    )
    axis.plot([end - 1, end - 0.4], [universal, universal / 2], color=GREY, linewidth=2)
    axis.annotate("+", (end - 0.4, universal / 2), ha="left", va="center", fontsize=14)
    axis.set_xticks(range(-1, end), ["queries", *(f"layer {layer.index}" for layer in layers)])
    axis.set_yticks(range(num_routed + 1), [*(f"expert {expert}" for expert in range(num_routed)), "universal"])
    axis.set(xlim=(-1.1, end), ylim=(num_routed + 0.4, -0.6))
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


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
