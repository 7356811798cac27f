"""What a Q-Former is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from moe_zero.layers.beam import ROUTINGS, WEIGHT_TYPES
from moe_zero.layers.token import GRANULARITIES

RESIDUALS = ("row", "parent")
MERGES = ("sum", "mean")


@dataclass(frozen=True)
class QFormerConfig:
    """Widths, counts and layer lists of a :class:`~moe_zero.qformer.QFormerModel`.

    The defaults are the full-size model: 242,361,344 parameters, three experts (one of them universal) in the
    upper six of twelve layers. Every value is checked when the configuration is made; a wrong one is a ``ValueError``
    that names the field, the value and what would be right.
    """

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    """Inner width of the text feed-forward and of every expert."""
    encoder_width: int = 1408
    """Width of the image tokens."""
    vocab_size: int = 30523
    """BERT uncased's 30522 and one start-of-decoding token."""
    max_position_embeddings: int = 512
    num_query_tokens: int = 32
    cross_attention_freq: int = 2
    """The queries look at the image in layer 0 and every so many after, unless ``cross_attention_layers`` is given."""
    cross_attention_layers: Sequence[int] | None = None
    moe_layers: Sequence[int] = (6, 7, 8, 9, 10, 11)
    """Layers whose query feed-forward is a mixture routed by beam search; the beams merge in the last of them."""
    num_experts: int = 3
    """Experts of a routed layer, the universal one included; with 1 every layer is dense, whatever ``moe_layers``."""
    num_beams: int = 3
    """Beams of a sample, the universal one included; of no effect in a dense model."""
    routing: str = "post_route"
    """How a routed layer chooses experts. For the beams of a sample: ``"post_route"``, the gate looks at what experts
    produce (as published), or ``"pre_route"``, at their input. Without beams, each layer on its own: ``"token"``, for
    every query, or ``"sequence"``, for the queries of a sample together; ``num_beams`` then has no effect."""
    top_k: int = 1
    """Experts of a query, or of a sample, where ``routing`` is ``"token"`` or ``"sequence"``."""
    gate_sees_dropout: bool = True
    """Whether a post-route gate looks at the experts' outputs after dropout (as published) or before it."""
    weight_type: str = "ffn_prob"
    """``"ffn_prob"``: a routed output is weighted by its expert's probability; ``"scaled_prob"``: by that times the
    number of routed experts, which is 1 between equal experts; ``"one_hot"``: not at all."""
    residual_from: str = "row"
    """Where a routed beam takes its residual from: the ``"row"`` at the same place (as published checkpoints were
    trained) or its ``"parent"`` beam."""
    merge: str = "sum"
    """What becomes of the universal beam and the best routed one in the last routed layer: their ``"sum"`` (as
    published) or their ``"mean"``, which keeps the scale of a dense layer."""
    use_text: bool = True
    """Whether there are text embeddings and text feed-forwards; without them the model takes queries alone."""
    lm_head: bool = False
    """Whether there is a head that scores the next word (BERT's ``cls.predictions``), for captions."""
    layer_norm_eps: float = 1e-12
    vision_layer_norm_eps: float = 1e-5
    """Epsilon of ``ln_vision``, the LayerNorm on the image features."""
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "encoder_width",
            "vocab_size",
            "max_position_embeddings",
            "num_query_tokens",
            "cross_attention_freq",
            "num_experts",
        ):
            _check_integer(name, getattr(self, name), at_least=1)
        if self.hidden_size % self.num_attention_heads:
            heads, width = self.num_attention_heads, self.hidden_size
            raise ValueError(f"num_attention_heads is {heads}, which does not divide hidden_size {width}")
        _check_integer("num_beams", self.num_beams, at_least=1 if self.num_experts == 1 else 2)
        if self.cross_attention_layers is None:
            layers: Sequence[int] = range(0, self.num_hidden_layers, self.cross_attention_freq)
            object.__setattr__(self, "cross_attention_layers", tuple(layers))
        for name in ("cross_attention_layers", "moe_layers"):
            object.__setattr__(self, name, self._checked_layers(name))
        _check_choice("routing", self.routing, (*ROUTINGS, *GRANULARITIES))
        _check_integer("top_k", self.top_k, at_least=1)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but num_experts is {self.num_experts}")
        _check_choice("weight_type", self.weight_type, WEIGHT_TYPES)
        _check_choice("residual_from", self.residual_from, RESIDUALS)
        _check_choice("merge", self.merge, MERGES)
        if self.lm_head and not self.use_text:
            raise ValueError("lm_head is True, but use_text is False; a head for words needs their embeddings")
        for name in ("layer_norm_eps", "vision_layer_norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a dropout probability is at least 0 and below 1")

    def _checked_layers(self, name: str) -> tuple[int, ...]:
        layers = getattr(self, name)
        if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence):
            raise ValueError(f"{name} is {layers!r}; it must be a list of layer numbers, such as [0, 2, 4]")
        for layer in layers:
            _check_integer(f"an entry of {name}", layer, at_least=0)
            if layer >= self.num_hidden_layers:
                raise ValueError(
                    f"{name} names layer {layer}, but num_hidden_layers is {self.num_hidden_layers}: "
                    f"layers are 0 to {self.num_hidden_layers - 1}"
                )
        if len(set(layers)) != len(layers):
            raise ValueError(f"{name} is {list(layers)}; it names a layer twice")
        return tuple(sorted(layers))

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The layers that route: ``moe_layers``, or none where there is one expert."""
        return tuple(self.moe_layers) if self.num_experts > 1 else ()

    @property
    def beam_layers(self) -> tuple[int, ...]:
        """Those of them that route beams: all or none."""
        return self.routed_layers if self.routing in ROUTINGS else ()

    @classmethod
    def from_dict(cls, values: Mapping) -> QFormerConfig:
        """Inverse of :meth:`to_dict`; an unknown key is an error that names it and the keys there are."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown Q-Former setting {', '.join(unknown)}; the settings are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict:
        """A dictionary of plain values, ready for JSON or YAML."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def _check_integer(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {at_least}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
