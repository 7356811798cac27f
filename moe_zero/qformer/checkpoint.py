"""Q-Formers in and out of the checkpoints that people have: transformers, LAVIS, the published mixture, BERT, our own.

Widths, layers and experts come from the weights; what weights can't tell (heads, epsilons, beams) comes from the
configuration beside them, and the report says from where. No tensor is passed over in silence.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_zero.qformer.checkpoint_config import find_configuration, transformers_config
from moe_zero.qformer.layouts import (
    LAYOUT_NAMES,
    LAYOUTS,
    LM_HEAD,
    LM_HEAD_COPIES,
    OUTSIDE,
    TEXT_NAMES,
    Placement,
    locate,
)
from moe_zero.qformer.model import QFormerModel
from moe_zero.qformer.upcycling import upcycle
from moe_zero.qformer.weight_files import WeightSource, check_target, open_weights, write_weights

MODEL_TYPE = "moe_zero_qformer"
"""``model_type`` in the ``config.json`` of our own folders."""


@dataclass
class ConversionReport:
    """What became of every tensor of a checkpoint."""

    source: str
    layout: str
    """One of :data:`LAYOUT_NAMES`."""
    prefix: str
    """What the Q-Former's names begin with in the source."""
    taken: dict[str, str] = field(default_factory=dict)
    """Our name of each weight that was taken, and the source's."""
    left: dict[str, str] = field(default_factory=dict)
    """Name of each tensor of the source that was not, and why."""
    unexplained: list[str] = field(default_factory=list)
    """Tensors of the source that were left and that nothing is known about."""
    missing: list[str] = field(default_factory=list)
    """Our weights that the source lacks; they are newly initialised."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that the weights don't show: the value, and where it is from."""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        reasons = Counter(self.left.values())
        example = {reason: name for name, reason in reversed(self.left.items())}
        prefix = f", under {self.prefix!r}" if self.prefix else ""
        return "\n".join(
            [
                f"read {self.source}: names of {LAYOUTS[self.layout].title}{prefix}",
                f"took {len(self.taken)} weights from {len(set(self.taken.values()))} tensors",
                *(f"  {name} = {value}" for name, value in self.settings.items()),
                *(f"left {count}: {reason} ({example[reason]} ...)" for reason, count in reasons.items()),
                *(f"left, and not known what for: {name}" for name in self.unexplained),
                *(f"missing, newly initialised: {name}" for name in self.missing),
                *self.notes,
            ]
        )


def load_qformer(
    source: str | os.PathLike | nn.Module | Mapping,
    *,
    allow_missing: bool = False,
    dtype: torch.dtype | None = None,
    query_ffn_from_text: bool = False,
    **settings,
) -> tuple[QFormerModel, ConversionReport]:
    """Build a Q-Former from a checkpoint.

    Args:
        source: a file, a folder, a module or a state dict; see :func:`moe_zero.qformer.weight_files.open_weights`. It
            may be a whole model that a Q-Former is part of. Names may be those of any of :data:`LAYOUT_NAMES`.
        allow_missing: initialise what the source lacks, and leave what is not known, instead of raising an error.
        dtype: of the weights; by default each keeps its own, and what is new gets that of the queries' projection.
        query_ffn_from_text: start the queries' feed-forward from the text's, for a BERT, which has no other.
        settings: of :class:`QFormerConfig`, where the source doesn't record them or to put others in their place. Those
            that the weights show must agree with them, except for a larger ``vocab_size``: its further rows start as
            the mean of all words.

    Returns:
        The model, in evaluation mode and independent of the source's memory, and what was done.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a checkpoint of a known kind; a setting that contradicts the weights, or is needed and not
            recorded; a weight of a wrong shape; and, unless ``allow_missing``, weights that the source lacks, or that
            it has and that are not known. All are named.
    """
    opened = open_weights(source)
    placement = locate(opened.weights)
    if query_ffn_from_text and placement.layout_name != "bert":
        raise ValueError(
            f"query_ffn_from_text is for a BERT, but {opened.where} is a Q-Former with a query feed-forward of its own"
        )
    config, origins = find_configuration(opened, placement, settings)
    report = ConversionReport(opened.where, placement.layout_name, placement.prefix, settings=origins)
    with torch.device("meta"):
        model = QFormerModel(config)
    for name in model.state_dict():
        names = placement.candidates(name)
        if query_ffn_from_text:
            names += placement.candidates(_renamed(name, TEXT_NAMES))
        found = next((candidate for candidate in names if candidate in opened.weights), None)
        if found is None:
            report.missing.append(name)
        else:
            report.taken[name] = found
    _explain_left(opened, placement, report)
    if not allow_missing:
        _refuse(report)

    tensors = {name: _read(opened, placement, name, found, report) for name, found in report.taken.items()}
    new_dtype = tensors["encoder.layer.0.attention.self.query.weight"].dtype
    tensors |= {name: _new_weight(model, name, new_dtype) for name in report.missing}
    for name, shape in ((name, weight.shape) for name, weight in model.state_dict().items()):
        if name in ("embeddings.word_embeddings.weight", "cls.predictions.bias"):
            tensors[name] = _with_rows(tensors[name], shape[0], report)
        if tensors[name].shape != shape:
            raise ValueError(
                f"{report.taken[name]} has shape {list(tensors[name].shape)} in {opened.where}; as {name} of a model "
                f"with its widths it must be {list(shape)}"
            )
    model.load_state_dict(tensors, assign=True)
    return model.to(dtype).eval(), report


def export_state_dict(model: QFormerModel, to: str, *, prefix: str | None = None) -> dict[str, Tensor]:
    """The weights of ``model`` by the names of another layout.

    Args:
        model: dense, unless the layout has names for experts.
        to: one of :data:`LAYOUT_NAMES`. ``"bert"`` takes the text side alone.
        prefix: of the Q-Former's own names, such as ``"qformer."`` in transformers' whole models; by default none for
            transformers, ``"Qformer.bert."`` for LAVIS and the published code. ``query_tokens``, the LayerNorm on the
            image features, and in ``"blip2"`` the text embeddings are named as they are in whole models, beside it.

    The tensors are those of the model, not copies. transformers' Q-Formers have no place for a
    language-modelling head, which is left out.

    Raises:
        ValueError: an unknown layout, or one that has no place for the model's experts, or that needs a text side.
    """
    _check_layout(to)
    layout, config = LAYOUTS[to], model.config
    if config.routed_layers:
        _check_place_for_experts(to, f"the model has experts in layers {list(config.routed_layers)}")
    if layout.text != "optional" and not config.use_text:
        raise ValueError(f"the model has no text side, which {layout.title} needs")
    prefix = layout.prefix if prefix is None else prefix
    state = model.state_dict()
    if not layout.lm_head:
        state = {name: tensor for name, tensor in state.items() if not name.startswith(LM_HEAD)}
    if layout.text == "only":
        state = {name: tensor for name, tensor in state.items() if _is_text_side(name)}
        words = state["embeddings.word_embeddings.weight"]
        state["embeddings.token_type_embeddings.weight"] = words.new_zeros(2, words.shape[1])
    return {layout.name(name, prefix): tensor for name, tensor in state.items()}


def _check_layout(to: str) -> None:
    if to not in LAYOUTS:
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(map(repr, LAYOUT_NAMES))}")


def _check_place_for_experts(to: str, found: str) -> None:
    layout = LAYOUTS[to]
    if not layout.routed and layout.text != "only":
        routed = ", ".join(key for key, other in LAYOUTS.items() if other.routed)
        raise ValueError(f"{found}, and {layout.title} has no place for them; layouts for a mixture are {routed}")


def save_qformer(model: QFormerModel, target: str | os.PathLike, *, to: str = "moe-zero") -> Path:
    """Write ``model`` by the names of a layout.

    Args:
        model: see :func:`export_state_dict`.
        target: a file that ends in ``.safetensors`` or like a torch file (``.pth``: the tensors under ``model``, as in
            LAVIS), or else a folder with ``model.safetensors`` and a ``config.json`` that ``from_pretrained`` of
            transformers reads in the layouts ``"blip2"``, ``"instructblip"`` and ``"bert"``.
        to: one of :data:`LAYOUT_NAMES`.

    Returns:
        The path of the weights. :func:`load_qformer` gets the same model from it, bit for bit; but for ``"bert"``,
        which holds the text side alone, and for a language-modelling head in transformers' Q-Formers, which have none.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in export_state_dict(model, to).items()}
    ours = {"model_type": MODEL_TYPE, **model.config.to_dict()}
    if not LAYOUTS[to].lm_head:
        ours["lm_head"] = False
    recorded = {} if LAYOUTS[to].text == "only" else ours
    return write_weights(tensors, Path(target), recorded, transformers_config(model.config, to) or ours)


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str = "moe-zero",
    allow_missing: bool = False,
    query_ffn_from_text: bool = False,
    experts: int = 1,
    beams: int = 3,
    moe_layers: Sequence[int] | None = None,
    equal: bool = False,
    settings: Mapping | None = None,
) -> ConversionReport:
    """Read a checkpoint of one layout, make a mixture of it if asked to, and write it in another.

    Args:
        source, allow_missing, query_ffn_from_text, settings: see :func:`load_qformer`.
        target, to: see :func:`save_qformer`.
        experts, beams, moe_layers, equal: see :func:`moe_zero.qformer.upcycling.upcycle`, which is called if
            ``experts`` is more than 1.

    Returns:
        What was done; its text is ready to be shown.

    Raises:
        ValueError, FileNotFoundError: as the functions named above, and where the target is the source.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ValueError(f"target is {target}, which is the source; write to another place")
    _check_layout(to)
    if experts > 1:
        _check_place_for_experts(to, f"experts is {experts}")
    check_target(target)
    model, report = load_qformer(
        source, allow_missing=allow_missing, query_ffn_from_text=query_ffn_from_text, **(settings or {})
    )
    if experts > 1:
        model = upcycle(model, num_experts=experts, num_beams=beams, moe_layers=moe_layers, equal=equal)
        routed = ", ".join(map(str, model.config.routed_layers))
        report.notes.append(f"made {experts} experts of each query feed-forward in layers {routed}; {beams} beams")
    written = save_qformer(model, target, to=to)
    if LAYOUTS[to].text == "only":
        dropped = sum(not _is_text_side(name) for name in model.state_dict())
        report.notes.append(f"not written, since {LAYOUTS[to].title} is a text side alone: {dropped} weights")
    if model.config.lm_head and not LAYOUTS[to].lm_head:
        report.notes.append(f"not written, since {LAYOUTS[to].title} has no place for it: the language-modelling head")
    report.notes.append(f"wrote {written} with the names of {LAYOUTS[to].title}")
    return report


def parse_settings(assignments: Sequence[str]) -> dict:
    """Settings from a command line: ``["num_beams=3", "weight_type=one_hot"]`` to their names and values.

    A value is read as JSON, and as a word where it isn't. ``ValueError`` names an entry without ``=``.
    """
    settings = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise ValueError(f"setting {assignment!r} must be NAME=VALUE, such as num_beams=3")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _explain_left(opened: WeightSource, placement: Placement, report: ConversionReport) -> None:
    taken = set(report.taken.values())
    has_head = any(name.startswith(LM_HEAD) for name in report.taken)
    for name in opened.weights:
        if name in taken:
            continue
        if _is_token_types(name, placement):
            report.left[name] = "its first row is added to the positions, all text being of one segment"
        elif copied := _copied_by(name, opened, placement):
            report.left[name] = f"a copy of {copied}"
        elif (reason := placement.reason_left(name)) and not (has_head and "cls.predictions." in name):
            report.left[name] = reason
        else:
            report.unexplained.append(name)


def _copied_by(name: str, opened: WeightSource, placement: Placement) -> str | None:
    """The tensor that a second weight of the language-modelling head is equal to, as it should be."""
    ours = next((ours for end, ours in LM_HEAD_COPIES.items() if name.endswith(f"cls.predictions.{end}")), None)
    found = next((other for other in placement.candidates(ours) if other in opened.weights), None) if ours else None
    return found if found and torch.equal(opened.weights[name], opened.weights[found]) else None


def _refuse(report: ConversionReport) -> None:
    if not report.missing and not report.unexplained:
        return
    problems = []
    if report.missing:
        problems.append(f"it lacks {', '.join(report.missing)}")
    if report.unexplained:
        problems.append(f"it has, and nothing is known of, {', '.join(report.unexplained)}")
    raise ValueError(
        f"{report.source}, read as {LAYOUTS[report.layout].title}, does not fill the model: {'; '.join(problems)}. "
        "With allow_missing (--allow-missing) what it lacks is newly initialised, and the rest left"
    )


def _read(opened: WeightSource, placement: Placement, name: str, found: str, report: ConversionReport) -> Tensor:
    tensor = opened.weights[found].detach()
    if name == "embeddings.position_embeddings.weight":
        types = next((other for other in report.left if _is_token_types(other, placement)), None)
        if types is not None:
            return tensor + opened.weights[types].detach()[0]
    return tensor.clone(memory_format=torch.contiguous_format)


def _new_weight(model: QFormerModel, name: str, dtype: torch.dtype) -> Tensor:
    """What :meth:`QFormerModel.reset_parameters` would make of one parameter, on the CPU."""
    owner = model.get_submodule(name.rpartition(".")[0])
    weight = torch.empty(model.get_parameter(name).shape, dtype=dtype, device="cpu")
    if name.endswith(".bias"):
        return weight.zero_()
    if isinstance(owner, nn.LayerNorm):
        return weight.fill_(1)
    weight.normal_(std=model.config.initializer_range)
    if (padding := getattr(owner, "padding_idx", None)) is not None:
        weight[padding] = 0
    return weight


def _is_token_types(name: str, placement: Placement) -> bool:
    return placement.layout_name == "bert" and name == f"{placement.prefix}embeddings.token_type_embeddings.weight"


def _with_rows(words: Tensor, rows: int, report: ConversionReport) -> Tensor:
    if (new := rows - words.shape[0]) <= 0:
        return words
    if words.dim() == 2:  # a bias gets its entries without another word
        report.notes.append(f"added {new} words to {words.shape[0]}, each the mean of all")
    return torch.cat([words, words.mean(0, keepdim=True).expand(new, *words.shape[1:])])


def _is_text_side(name: str) -> bool:
    """Whether text alone passes through the weight."""
    return name not in OUTSIDE and not re.search(r"\.(crossattention|experts|expert_ln)\.", name)


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for part, theirs in renames:
        name = name.replace(part, theirs)
    return name
