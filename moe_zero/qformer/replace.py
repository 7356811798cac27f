"""Our Q-Former in place of transformers' inside of whole BLIP-2 and InstructBLIP models.

:func:`replace_qformer` does it to a model in memory. Besides, this module has classes of the names of
:data:`REPLACEABLE`, subclasses of transformers' with our Q-Former
(``from moe_zero.qformer.replace import Blip2ForConditionalGeneration``): a replaced model is of such a class, and
``from_pretrained`` of it reads what such a model saves. What a dense one saves is transformers' own format, which
transformers' own class reads as well.

Legend of shape suffixes: B samples, Q queries, T text tokens, D hidden size, P image tokens, W image width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

try:
    import transformers
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    hint = "moe_zero.qformer.replace needs transformers: pip install 'moe-zero[hf]'"
    raise ModuleNotFoundError(hint, name=error.name) from error

from moe_zero.qformer.checkpoint import load_qformer
from moe_zero.qformer.checkpoint_config import MIXTURE_FIELD, TRANSFORMERS_SETTINGS, settings_of
from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.layer import Rows
from moe_zero.qformer.layouts import LAYOUTS, OUTSIDE, TEXT_EMBEDDINGS
from moe_zero.qformer.model import QFormerEmbeddings, QFormerEncoder, QFormerOutput, additive, self_attention_mask
from moe_zero.qformer.upcycling import upcycle

REPLACEABLE = (
    "Blip2Model",
    "Blip2ForConditionalGeneration",
    "Blip2ForImageTextRetrieval",
    "Blip2TextModelWithProjection",
    "Blip2VisionModelWithProjection",
    "InstructBlipModel",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoModel",
    "InstructBlipVideoForConditionalGeneration",
)
"""transformers' models that have a Q-Former, as far as the installed version knows them."""
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of ``from_pretrained`` that say where to find a model."""


@dataclass
class ReplacedQFormerOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """What a replaced Q-Former returns, as ``qformer_outputs`` of the whole model: transformers' fields and ours.

    ``attentions`` and ``cross_attentions`` are never there: attention weights are not formed.
    """

    gate_loss: Tensor | None = None
    """[]: to be added to the loss of a mixture in training; see :class:`~moe_zero.qformer.QFormerOutput`."""
    gate_importance: Tensor | None = None
    beam_scores: Tensor | None = None
    expert_route: Tensor | None = None


class ReplacedQFormer(nn.Module):
    """Our embeddings and blocks, called like one of transformers' Q-Formers.

    Args:
        config: ours.
        outer_config: transformers' ``qformer_config``, for whoever looks at the Q-Former's ``config``.
        embeds_text: whether the text embeddings are in here. Where they are in the whole model, text comes embedded.
    """

    def __init__(self, config: QFormerConfig, outer_config, *, embeds_text: bool):
        super().__init__()
        self.config = outer_config
        self.has_text = config.use_text
        self.embeddings = QFormerEmbeddings(config if embeds_text else replace(config, use_text=False))
        self.encoder = QFormerEncoder(config)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; transformers keeps a BLIP-2's Q-Former in fp32 whatever the rest is."""
        return self.embeddings.LayerNorm.weight.dtype

    def _run(
        self,
        rows: Rows,
        attention_mask: Tensor | None,
        image_BPW: Tensor | None,
        image_mask: Tensor | None,
        *,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        **_,  # of other parts of the whole model, which hands all it gets to each
    ) -> ReplacedQFormerOutput | tuple[Tensor, ...]:
        queries, text = rows
        reference = text if queries is None else queries
        num_queries, num_text = (0 if part is None else part.shape[1] for part in rows)
        mask = None
        if not _keeps_all(attention_mask):
            attention_mask = attention_mask.to(reference.device)
            mask = self_attention_mask(attention_mask, reference.shape[0], num_queries, num_text, reference.dtype)
        if not _keeps_all(image_mask):
            image_mask = additive(image_mask[:, None, None, :].to(reference.device), reference.dtype)
        else:
            image_mask = None
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        encoded = self.encoder(rows, mask, image_BPW, image_mask, output_hidden_states=output_hidden_states)
        ours = QFormerOutput.of(encoded)
        output = ReplacedQFormerOutput(
            last_hidden_state=ours.last_hidden_state,
            pooler_output=ours.last_hidden_state[:, 0],
            hidden_states=ours.hidden_states,
            gate_loss=None if ours.gate_importance is None else ours.gate_loss,
            gate_importance=ours.gate_importance,
            beam_scores=ours.beam_scores,
            expert_route=ours.expert_route,
        )
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return output if return_dict else output.to_tuple()

    def _placed(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.embeddings.LayerNorm.weight)


class ReplacedBlip2QFormer(ReplacedQFormer):
    """In place of transformers' ``Blip2QFormerModel``."""

    def __init__(self, config: QFormerConfig, outer_config):
        super().__init__(config, outer_config, embeds_text=False)

    def forward(
        self,
        query_embeds: Tensor,
        query_length: int | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs,
    ) -> ReplacedQFormerOutput | tuple[Tensor, ...]:
        """Run on embedded rows.

        Args:
            query_embeds: [B, Q + T, D], the queries in front.
            query_length: Q; by default all rows are queries.
            attention_mask: [B, Q + T], 1 to keep; ``None`` keeps all.
            encoder_hidden_states: [B, P, W].
            encoder_attention_mask: [B, P], 1 to keep.
            kwargs: ``return_dict``, ``output_hidden_states``; others are ignored.
        """
        num_queries = query_embeds.shape[1] if query_length is None else query_length
        parts = query_embeds[:, :num_queries], query_embeds[:, num_queries:]
        queries, text = (self._embedded(part) if part.shape[1] else None for part in parts)
        if text is not None and not self.has_text:
            raise ValueError(
                f"query_embeds has {query_embeds.shape[1]} rows, {num_queries} of them queries, but the Q-Former was "
                "built without text (use_qformer_text_input is False)"
            )
        image = self._placed(encoder_hidden_states)
        return self._run(Rows(queries, text), attention_mask, image, encoder_attention_mask, **kwargs)

    def _embedded(self, x: Tensor) -> Tensor:
        return self.embeddings(self._placed(x), None).queries


class ReplacedInstructBlipQFormer(ReplacedQFormer):
    """In place of transformers' ``InstructBlipQFormerModel`` and ``InstructBlipVideoQFormerModel``."""

    def __init__(self, config: QFormerConfig, outer_config):
        super().__init__(config, outer_config, embeds_text=True)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        query_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs,
    ) -> ReplacedQFormerOutput | tuple[Tensor, ...]:
        """Run on queries, token numbers, or both.

        Args:
            input_ids: [B, T].
            attention_mask: [B, Q + T], 1 to keep; ``None`` keeps all.
            position_ids: must be ``None``: tokens stand in the order that they come in.
            query_embeds: [B, Q, D].
            encoder_hidden_states: [B, P, W].
            encoder_attention_mask: [B, P], 1 to keep.
            kwargs: ``return_dict``, ``output_hidden_states``; others are ignored.
        """
        if position_ids is not None:
            raise ValueError("position_ids is given; this Q-Former numbers its tokens itself, from 0")
        if input_ids is None and query_embeds is None:
            raise ValueError("neither query_embeds nor input_ids is given; pass at least one")
        if input_ids is not None:
            input_ids = input_ids.to(self.embeddings.LayerNorm.weight.device)
        rows = self.embeddings(self._placed(query_embeds), input_ids)
        return self._run(rows, attention_mask, self._placed(encoder_hidden_states), encoder_attention_mask, **kwargs)


def replace_qformer(
    model: nn.Module,
    *,
    num_experts: int = 1,
    num_beams: int = 3,
    moe_layers: Sequence[int] | None = None,
    equal: bool = False,
    **settings,
) -> nn.Module:
    """Put our Q-Former in place of transformers' inside of ``model``.

    Args:
        model: of one of :data:`REPLACEABLE`, or of a subclass, with its weights in memory. It is changed, and gets the
            class of the same name in this module. Do it before an optimizer takes the parameters.
        num_experts, num_beams, moe_layers, equal, settings: of :func:`moe_zero.qformer.upcycling.upcycle`. With one
            expert the Q-Former stays dense and computes what it did. The loss of a mixture lacks
            ``output.qformer_outputs.gate_loss``, which is for the caller to weigh and add.

    Returns:
        ``model``. ``generate``, ``gradient_checkpointing_enable``, ``save_pretrained`` and the rest work as before.
        Saved dense, it is transformers' own again. Saved as a mixture, ``from_pretrained`` of its new class reads it.

    Raises:
        ValueError: it has no Q-Former of transformers', or the weights are elsewhere (offloaded), or a setting is
            wrong.
    """
    theirs = getattr(model, "qformer", None)
    if isinstance(theirs, ReplacedQFormer):
        raise ValueError(f"the Q-Former of this {type(model).__name__} is replaced already")
    if theirs is None or not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"{type(model).__name__} has no Q-Former of transformers'; models with one are {REPLACEABLE}")
    if any(parameter.is_meta for parameter in theirs.parameters()):
        raise ValueError("the Q-Former's weights are offloaded or not loaded; load the model with it in memory")
    if num_experts == 1 and settings:
        raise ValueError(f"{', '.join(settings)} is for a mixture; give num_experts of at least 2")
    ours, report = load_qformer(theirs, allow_missing=True)
    lacking = [name for name in report.missing if name not in OUTSIDE and not name.startswith(TEXT_EMBEDDINGS)]
    if lacking or report.unexplained:
        raise ValueError(f"the Q-Former lacks {lacking} and has {report.unexplained}, of which nothing is known")
    source = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(name in report.taken and source[report.taken[name]].requires_grad)
    if num_experts > 1:
        ours = upcycle(
            ours, num_experts=num_experts, num_beams=num_beams, moe_layers=moe_layers, equal=equal, **settings
        )
        _record(model, ours.config)

    replaced = _replacement(theirs, ours.config, device="meta")
    replaced.encoder = ours.encoder
    if replaced.embeddings.word_embeddings is None:
        replaced.embeddings.LayerNorm = ours.embeddings.LayerNorm
    else:
        replaced.embeddings = ours.embeddings
    for module in theirs.modules():
        if getattr(module, "gradient_checkpointing", False):
            replaced.encoder.gradient_checkpointing = True
            replaced.encoder._gradient_checkpointing_func = module._gradient_checkpointing_func
    model.qformer = replaced.train(theirs.training)
    model.__class__ = _with_our_qformer(type(model))
    return model


class _WithOurQFormer:
    """What the classes of this module have before transformers' own."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.qformer = _replacement(self.qformer, _config_of(self.qformer))
        self.qformer.apply(self._init_weights)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Read a mixture that was saved by this class, or a dense model as transformers saves it."""
        config = kwargs.get("config")
        if not isinstance(config, transformers.PretrainedConfig):
            hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
            config = cls.config_class.from_pretrained(config or pretrained_model_name_or_path, **hub)
        if getattr(config.qformer_config, MIXTURE_FIELD, None):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        base = next(ancestor for ancestor in cls.__mro__ if not issubclass(ancestor, _WithOurQFormer))
        loaded = base.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if isinstance(loaded, tuple):  # output_loading_info
            return replace_qformer(loaded[0]), *loaded[1:]
        return replace_qformer(loaded)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, state_dict: dict | None = None, **kwargs):
        """As in transformers; a dense Q-Former by transformers' names."""
        if not getattr(self.config.qformer_config, MIXTURE_FIELD, None):
            layout = LAYOUTS["blip2" if isinstance(self.qformer, ReplacedBlip2QFormer) else "instructblip"]
            state_dict = self.state_dict() if state_dict is None else state_dict
            inside = "qformer."
            state_dict = {
                layout.name(name.removeprefix(inside), inside) if name.startswith(inside) else name: tensor
                for name, tensor in state_dict.items()
            }
        return super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)


@lru_cache
def _with_our_qformer(cls: type) -> type:
    """The subclass of ``cls`` with our Q-Former; it has the same name, which is what a saved configuration holds."""
    if issubclass(cls, _WithOurQFormer):
        return cls
    body = {
        "__module__": __name__,
        "__doc__": f"transformers' ``{cls.__name__}`` with our Q-Former in it.",
        "_no_split_modules": [*(cls._no_split_modules or ()), "QFormerLayer"],
    }
    return type(cls.__name__, (_WithOurQFormer, cls), body)


def __getattr__(name: str) -> type:
    if name in REPLACEABLE and hasattr(transformers, name):
        return _with_our_qformer(getattr(transformers, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _config_of(theirs: nn.Module) -> QFormerConfig:
    """Our configuration for transformers' Q-Former ``theirs``, or for the mixture recorded in its configuration."""
    has_text = hasattr(theirs.encoder.layer[0], "intermediate")
    dense = {"use_text": has_text, "num_experts": 1, "moe_layers": ()}
    return QFormerConfig.from_dict(dense | settings_of(theirs.config.to_dict(), type(theirs).__name__))


def _replacement(theirs: nn.Module, config: QFormerConfig, device: str | None = None) -> ReplacedQFormer:
    cls = ReplacedInstructBlipQFormer if hasattr(theirs, "embeddings") else ReplacedBlip2QFormer
    with torch.device(device) if device else nullcontext():
        return cls(config, theirs.config)


def _record(model: nn.Module, config: QFormerConfig) -> None:
    """Write what makes the mixture into the configuration of the whole model, for ``from_pretrained``."""
    known = {*TRANSFORMERS_SETTINGS.values(), "use_text", "cross_attention_layers"}
    settings = {name: value for name, value in config.to_dict().items() if name not in known}
    for owner in (model.config.qformer_config, model.qformer.config):
        setattr(owner, MIXTURE_FIELD, settings)


def _keeps_all(mask: Tensor | None) -> bool:
    """Whether the mask can be left out, so that attention may take its fastest path. Asked as transformers does: not
    where reading the answer from a device would break a compiled or captured graph."""
    if mask is None:
        return True
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(mask.all())
