"""The configuration of a Q-Former in a checkpoint, and that of a checkpoint for transformers.

What names and shapes show is taken from them and must not be contradicted. The rest is what the caller gives, else what
is recorded beside the weights, else an assumption that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

import torch

from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.layouts import LM_HEAD_SHOWN_BY, Placement
from moe_zero.qformer.weight_files import WeightSource

MIXTURE_FIELD = "moe_zero"
"""Where a whole model's ``qformer_config`` keeps the settings of a mixture in the place of its Q-Former."""
TRANSFORMERS_SETTINGS = {
    **{
        name: name
        for name in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
            *("vocab_size", "max_position_embeddings", "num_query_tokens", "layer_norm_eps", "vision_layer_norm_eps"),
            *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
        )
    },
    "encoder_hidden_size": "encoder_width",
    "cross_attention_frequency": "cross_attention_freq",
}
"""Settings of transformers' configurations, BERT's included, and what they are called here."""
BERT_HEAD_SIZE = 64
EXACT_GELU = ("gelu", "gelu_python")
"""What transformers calls GELU in its erf form."""


def find_configuration(
    opened: WeightSource, placement: Placement, given: Mapping
) -> tuple[QFormerConfig, dict[str, str]]:
    """The configuration, and for settings that the weights don't show their values and where those are from."""
    names = [setting.name for setting in fields(QFormerConfig)]
    recorded = [("given", given)]
    for where, config in ((f"from {opened.config_where}", opened.config), ("recorded in the file", opened.embedded)):
        recorded.append((where, {} if config is None else settings_of(config, opened.where)))
    for where, found in recorded:
        if unknown := sorted(set(found) - set(names)):
            raise ValueError(
                f"unknown Q-Former setting {', '.join(unknown)} ({where}); the settings are {', '.join(names)}"
            )
    shown = _shown_by_weights(opened, placement)
    assumed = _assumed(opened, placement, shown)

    values, origins = {}, {}
    for name in names:
        choices = [(where, found[name]) for where, found in recorded if found.get(name) is not None]
        if name in shown:
            values[name] = shown[name]
            for where, value in choices:
                value = tuple(value) if isinstance(value, list) else value
                if name == "lm_head" and where == "given":  # a head may be left, or be newly made
                    values[name] = value
                    continue
                if name == "vocab_size" and (where != "given" or value >= shown[name]):
                    # Published configurations count words that were never added to the weights, or were added later.
                    values[name] = given.get(name) or shown[name]
                elif value != shown[name]:
                    hint = "; load it as it is, then call upcycle" if name in ("num_experts", "moe_layers") else ""
                    raise ValueError(f"{name} is {value} ({where}), but the weights have {shown[name]}{hint}")
        elif choices:
            origin, values[name] = choices[0]
            origins[name] = f"{values[name]}, {origin}"
        elif name in assumed:
            values[name], origin = assumed[name]
            origins[name] = f"{values[name]}, not recorded: {origin}"
    for name in {"cross_attention_freq"} | ({"moe_layers"} if values["num_experts"] == 1 else set()):
        origins.pop(name, None)  # of no effect where the weights show the layers
    config = QFormerConfig(**values)
    if config.beam_layers and "num_beams" not in values:
        raise ValueError(
            f"num_beams is not recorded in {opened.where}, and the weights don't show it; "
            "give num_beams (--set num_beams=3)"
        )
    return config, origins


def settings_of(config: Mapping, where: str) -> dict:
    """Our settings from our own configuration or from one of transformers', of a whole model or of its Q-Former."""
    if "encoder_width" in config:
        return {name: value for name, value in config.items() if name != "model_type"}
    inner = config.get("qformer_config") or config
    inner = inner if isinstance(inner, Mapping) else inner.to_dict()
    if (activation := inner.get("hidden_act", "gelu")) not in EXACT_GELU:
        raise ValueError(f"hidden_act is {activation!r} in the configuration of {where}; this Q-Former has exact GELU")
    if (positions := inner.get("position_embedding_type", "absolute")) != "absolute":
        raise ValueError(
            f"position_embedding_type is {positions!r} in the configuration of {where}; this Q-Former's are absolute"
        )
    settings = {ours: inner[theirs] for theirs, ours in TRANSFORMERS_SETTINGS.items() if theirs in inner}
    if inner is not config:
        settings["num_query_tokens"] = config.get("num_query_tokens")
        settings["vision_layer_norm_eps"] = (config.get("vision_config") or {}).get("layer_norm_eps")
    return settings | (inner.get(MIXTURE_FIELD) or {})


def _shown_by_weights(opened: WeightSource, placement: Placement) -> dict:
    """The settings that names and shapes tell."""
    weights = opened.weights

    def shape(name: str) -> torch.Size | None:
        found = next((candidate for candidate in placement.candidates(name) if candidate in weights), None)
        return None if found is None else weights[found].shape

    def layers_with(name: str) -> tuple[int, ...]:
        return tuple(i for i in range(shown["num_hidden_layers"]) if shape(f"encoder.layer.{i}.{name}") is not None)

    layer = re.compile(re.escape(placement.prefix) + r"encoder\.layer\.(\d+)\..*")
    indices = {int(match[1]) for name in weights if (match := layer.fullmatch(name))}
    shown: dict = {"num_hidden_layers": max(indices) + 1}
    shown["hidden_size"] = shape("encoder.layer.0.attention.self.query.weight")[0]

    routed = layers_with("experts.gate.weight")
    experts = 1
    if routed:
        experts = sum(
            shape(f"encoder.layer.{routed[0]}.experts.experts.{e}.dense1.weight") is not None
            for e in range(len(weights))
        )
        shown["moe_layers"] = routed
    shown["num_experts"] = experts

    text_ffn, words = shape("encoder.layer.0.intermediate.dense.weight"), shape("embeddings.word_embeddings.weight")
    shown["use_text"] = text_ffn is not None or words is not None
    shown["lm_head"] = shape(LM_HEAD_SHOWN_BY) is not None
    if words is not None:
        shown["vocab_size"] = words[0]
    if (positions := shape("embeddings.position_embeddings.weight")) is not None:
        shown["max_position_embeddings"] = positions[0]
    ffn = ("experts.dense1.weight", "experts.experts.0.dense1.weight", "intermediate.dense.weight")
    widths = [width for name in ffn if (width := shape(f"encoder.layer.0.{name}")) is not None]
    if widths:
        shown["intermediate_size"] = widths[0][0]
    if placement.layout.text != "only":
        shown["cross_attention_layers"] = cross = layers_with("crossattention.self.key.weight")
        if cross:
            shown["encoder_width"] = shape(f"encoder.layer.{cross[0]}.crossattention.self.key.weight")[1]
    if (queries := shape("query_tokens")) is not None:
        shown["num_query_tokens"] = queries[1]
    return shown


def _assumed(opened: WeightSource, placement: Placement, shown: Mapping) -> dict[str, tuple[object, str]]:
    """Settings for when nothing records them, and why these."""
    defaults = QFormerConfig()
    heads = max(1, shown["hidden_size"] // BERT_HEAD_SIZE)
    assumed = {
        "num_attention_heads": (heads, f"BERT's heads have size {BERT_HEAD_SIZE}"),
        "layer_norm_eps": (defaults.layer_norm_eps, "BERT's"),
        "vision_layer_norm_eps": (defaults.vision_layer_norm_eps, "LAVIS's"),
    }
    if placement.layout.vision_norm != "ln_vision":
        assumed["vision_layer_norm_eps"] = (1e-6, "transformers' default")
    if shown["num_experts"] == 1:
        return assumed | {"moe_layers": ((), "dense")}
    routing = ("routing", "gate_sees_dropout", "weight_type", "residual_from", "merge")
    return assumed | {name: (getattr(defaults, name), "as published") for name in routing}


def transformers_config(config: QFormerConfig, to: str) -> dict | None:
    """``config.json`` as transformers reads it; ``None`` for layouts that it has no model for."""
    model_types = {
        "blip2": ("blip_2_qformer", "Blip2QFormerModel"),
        "instructblip": ("instructblip_qformer", "InstructBlipQFormerModel"),
        "bert": ("bert", "BertModel"),
    }
    if to not in model_types:
        return None
    model_type, architecture = model_types[to]
    written = {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_act": EXACT_GELU[0],
        "pad_token_id": 0,
    }
    written |= {theirs: getattr(config, ours) for theirs, ours in TRANSFORMERS_SETTINGS.items()}
    if to == "bert":
        queries = ("encoder_hidden_size", "cross_attention_frequency", "num_query_tokens", "vision_layer_norm_eps")
        return {name: value for name, value in written.items() if name not in queries} | {"type_vocab_size": 2}
    written["cross_attention_frequency"] = _frequency(config)
    if to == "blip2":
        written["use_qformer_text_input"] = config.use_text
    return written


def _frequency(config: QFormerConfig) -> int:
    count, layers = config.num_hidden_layers, tuple(config.cross_attention_layers)
    for frequency in (config.cross_attention_freq, *range(1, count + 1)):
        if tuple(range(0, count, frequency)) == layers:
            return frequency
    raise ValueError(
        f"cross_attention_layers is {list(layers)}; transformers has cross-attention in layer 0 and every so many after"
    )
