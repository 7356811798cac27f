"""How published checkpoints name the weights of a Q-Former, and where in a whole model they keep it.

A layout says, for each of our names, what it is called there; it knows no widths and reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

DENSE_NAMES = (
    (".experts.dense1.", ".intermediate_query.dense."),
    (".experts.dense2.", ".output_query.dense."),
    (".expert_ln.", ".output_query.LayerNorm."),
)
"""The query feed-forward, as LAVIS and transformers call it."""
TRANSFORMERS_NAMES = (
    (".attention.self.", ".attention.attention."),
    (".crossattention.self.", ".crossattention.attention."),
)
TEXT_NAMES = (
    (".experts.dense1.", ".intermediate.dense."),
    (".experts.dense2.", ".output.dense."),
    (".expert_ln.", ".output.LayerNorm."),
)
"""The text feed-forward in the query feed-forward's place, for checkpoints that have no other."""
OLD_BERT_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Parts of names, and what stands there in BERT's first checkpoints, which are still much used."""
OUTSIDE = ("query_tokens", "ln_vision.weight", "ln_vision.bias")
"""Ours that whole models keep beside the Q-Former, not in it."""
LM_HEAD = "cls."
"""What the names of the language-modelling head begin with; BERT keeps it beside ``bert.``, LAVIS beside
``Qformer.bert.``."""
LM_HEAD_SHOWN_BY = "cls.predictions.transform.dense.weight"
LM_HEAD_COPIES = {
    "decoder.weight": "embeddings.word_embeddings.weight",
    "decoder.bias": "cls.predictions.bias",
}
"""Weights that the head has twice in published checkpoints, by the ends of their names, and ours that they equal."""
TEXT_EMBEDDINGS = ("embeddings.word_embeddings.", "embeddings.position_embeddings.")


@dataclass(frozen=True)
class Layout:
    """Names of one kind of checkpoint."""

    title: str
    prefix: str = ""
    """What its names begin with where the Q-Former has a file of its own."""
    renames: tuple[tuple[str, str], ...] = ()
    """Parts of our names, and what stands there in their place."""
    routed: bool = False
    """Whether it has names for experts and gates."""
    text: str = "optional"
    """Whether it has a text side: ``"optional"``, ``"required"``, or ``"only"`` that."""
    text_embeddings_outside: bool = False
    """Whether a whole model keeps the text embeddings beside the Q-Former."""
    lm_head: bool = True
    """Whether it has a place for the language-modelling head."""
    vision_norm: str = "ln_vision"
    """Name of the LayerNorm on the image features; transformers applies it at the end of its image encoder."""

    def name(self, ours: str, prefix: str) -> str:
        """Full name of our weight ``ours``, that of the Q-Former's own weights with ``prefix``."""
        if ours in OUTSIDE:
            return ours.replace("ln_vision", self.vision_norm)
        if self.text_embeddings_outside and ours.startswith(TEXT_EMBEDDINGS):
            return ours
        if ours.startswith(LM_HEAD):
            return prefix.removesuffix("bert.") + ours
        for part, theirs in self.renames:
            ours = ours.replace(part, theirs)
        return prefix + ours


LAYOUTS = {
    "moe-zero": Layout("this package", routed=True),
    "published": Layout("the published mixture-of-experts code", prefix="Qformer.bert.", routed=True),
    "lavis": Layout("LAVIS", prefix="Qformer.bert.", renames=DENSE_NAMES),
    "blip2": Layout(
        "transformers' Blip2QFormerModel",
        renames=(*DENSE_NAMES, *TRANSFORMERS_NAMES, ("embeddings.LayerNorm.", "layernorm.")),
        text_embeddings_outside=True,
        lm_head=False,
        vision_norm="vision_model.post_layernorm",
    ),
    "instructblip": Layout(
        "transformers' InstructBlipQFormerModel",
        renames=(*DENSE_NAMES, *TRANSFORMERS_NAMES, ("embeddings.LayerNorm.", "embeddings.layernorm.")),
        text="required",
        lm_head=False,
        vision_norm="vision_model.post_layernorm",
    ),
    "bert": Layout("BERT", text="only"),
}
LAYOUT_NAMES = tuple(LAYOUTS)

FIRST_QUERY = re.compile(r"(?P<prefix>.*?)encoder\.layer\.0\.attention\.(?P<kind>self|attention)\.query\.weight")
KNOWN_PREFIXES = ("Qformer.bert.", "qformer.", "bert.")

LEFT_REASONS = (
    (r"(.*\.)?position_ids", "a buffer that counts the positions"),
    (r"(visual_encoder|vision_model|vision_tower)\..*", "the image encoder"),
    (r"(language_model|opt_model|llm_model|t5_model)\..*", "the language model"),
    (r"(language_projection|opt_proj|llm_proj|t5_proj)\..*", "the projection to a language model"),
    (r"(vision_proj|vision_projection|image_projection|text_proj|text_projection)\..*", "a contrastive projection"),
    (r"temp|log_temperature", "the contrastive temperature"),
    (r"(itm_head|matching_head)\..*", "the matching head"),
    (r"(.*\.)?cls\.seq_relationship\..*", "BERT's head for the next sentence"),
    (r"(.*\.)?cls\.predictions\..*", "the language-modelling head"),
    (r"(bert\.)?pooler\..*", "BERT's pooler"),
)
"""What whole models keep beside a Q-Former, by name below the root, and why it is of no use to us."""


@dataclass(frozen=True)
class Placement:
    """Where in a state dict a Q-Former is."""

    layout_name: str
    root: str
    """What the names of the whole model begin with, such as ``"module."``; mostly nothing."""
    prefix: str
    """What the names of the Q-Former begin with, the root included."""

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.layout_name]

    def candidates(self, name: str) -> list[str]:
        """Full names under which our ``name`` may be found, the likeliest first."""
        layout = self.layout
        if name not in OUTSIDE:
            inside = layout.name(name, self.prefix)
            beside = [self.root + name] if name.startswith(TEXT_EMBEDDINGS) else []
            old = [inside.replace(new, old) for new, old in OLD_BERT_NAMES if inside.endswith(new)]
            return [inside, *beside, *old]
        # Our own models may be replaced parts of transformers' whole models, so any norm may be beside any layout.
        norms = dict.fromkeys((layout.vision_norm, "ln_vision", "vision_model.post_layernorm"))
        names = dict.fromkeys(name.replace("ln_vision", norm) for norm in norms)
        return [self.prefix + name, *(self.root + name for name in names)]

    def reason_left(self, name: str) -> str | None:
        """Why a tensor of the source is of no use to us; ``None`` where that is not known."""
        for pattern, reason in LEFT_REASONS:
            if re.fullmatch(pattern, name.removeprefix(self.root)):
                return reason
        return None


def locate(names: Iterable[str]) -> Placement:
    """Find the Q-Former (or BERT) among the names of a state dict.

    Raises:
        ValueError: there is none, or there are several.
    """
    names = set(names)
    found = [match for name in sorted(names) if (match := FIRST_QUERY.fullmatch(name))]
    if len(found) > 1:  # an image encoder or a language model may be built of such layers too
        found = [match for match in found if "qformer" in match["prefix"].lower()] or found
    if len(found) != 1:
        state = "none" if not found else f"several, under {', '.join(repr(match['prefix']) for match in found)}"
        raise ValueError(
            "a Q-Former or BERT has a weight *encoder.layer.0.attention.self.query.weight (or .attention.attention.); "
            f"there is {state} among {len(names)} names, such as {', '.join(sorted(names)[:5])}"
        )
    prefix, kind = found[0]["prefix"], found[0]["kind"]
    root = next((prefix.removesuffix(known) for known in KNOWN_PREFIXES if prefix.endswith(known)), prefix)
    has = {part: f"{prefix}encoder.layer.0.{part}.weight" in names for part in ("expert_ln", "output_query.LayerNorm")}
    if kind == "attention":
        if not has["output_query.LayerNorm"]:
            raise ValueError(f"the layers under {prefix!r} have no output_query: they are no Q-Former's")
        return Placement("instructblip" if f"{prefix}embeddings.layernorm.weight" in names else "blip2", root, prefix)
    if has["expert_ln"]:
        return Placement("published" if prefix.endswith("Qformer.bert.") else "moe-zero", root, prefix)
    return Placement("lavis" if has["output_query.LayerNorm"] else "bert", root, prefix)
