"""The Q-Former: embeddings, blocks, and what goes in and comes out.

Legend of shape suffixes: B samples, N beams, Q queries, T text tokens, S = Q + T, D hidden size, P image tokens, W
image width, L routed layers, R routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_zero.layers.beam import BeamState, importance_loss
from moe_zero.qformer.cache import QFormerCache, causal_keep
from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.layer import LayerCache, LayerOutput, QFormerLayer, Rows
from moe_zero.qformer.lm_head import LanguageModelHead

DROPPED = -10000.0
"""What an attention score gets where the mask drops it; the value of published checkpoints, finite in fp16 too."""


class QFormerOutput(NamedTuple):
    """What a :class:`QFormerModel` returns."""

    last_hidden_state: Tensor
    """[B, Q + T, D], the queries in front; after a cache [B, T, D], the text alone."""
    beam_scores: Tensor | None
    """[B], fp32: probability of the chosen route; ``None`` where nothing was routed. No gradient."""
    expert_route: Tensor | None
    """[B, L], int64: the expert that the chosen route took in each routed layer; ``None`` where nothing was routed."""
    gate_loss: Tensor
    """[]: sum over the routed layers of the importance loss; 0 where nothing was routed."""
    gate_importance: Tensor | None
    """[L, R], fp32: probability per routed expert summed over the batch's rows, differentiable. For a gate loss that
    does not depend on how a batch is split over ranks, sum it over them and take ``importance_loss(...).sum()``."""
    hidden_states: tuple[Tensor, ...] | None
    """On demand: the input of each layer, then the last output. [B, S, D], or [B * N, S, D] between the first routed
    layer and the last: rows ``b * N ... b * N + N - 2`` are the routed beams of sample b, row ``b * N + N - 1`` the
    universal one."""
    cache: QFormerCache | None = None
    """On demand: for text that comes after these positions."""

    @classmethod
    def of(cls, encoded: EncoderOutput, cache: QFormerCache | None = None) -> QFormerOutput:
        """From what the blocks return."""
        last_hidden_state, beams, importance = encoded.rows.joined(), encoded.beams, encoded.importance
        return cls(
            last_hidden_state=last_hidden_state,
            beam_scores=None if beams is None else beams.scores[:, 0],
            expert_route=None if beams is None else beams.routes[:, 0],
            gate_loss=last_hidden_state.new_zeros(()) if importance is None else importance_loss(importance).sum(),
            gate_importance=importance,
            hidden_states=encoded.hidden_states,
            cache=cache,
        )


class QFormerEmbeddings(nn.Module):
    """Word + position for the text, the queries in front of it as they are, one LayerNorm over both.

    Without text in the configuration, the LayerNorm is all there is.
    """

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.word_embeddings = self.position_embeddings = None
        if config.use_text:
            self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, query_embeds: Tensor | None, input_ids: Tensor | None, first_position: int = 0) -> Rows:
        text = None
        if input_ids is not None:
            positions = slice(first_position, first_position + input_ids.shape[1])
            text = self.word_embeddings(input_ids) + self.position_embeddings.weight[positions]
        return Rows(*(None if part is None else self.dropout(self.LayerNorm(part)) for part in (query_embeds, text)))


class EncoderOutput(NamedTuple):
    """What a :class:`QFormerEncoder` returns."""

    rows: Rows
    beams: BeamState | None
    """The chosen route of each sample, k = 1; ``None`` where nothing was routed."""
    importance: Tensor | None
    """[L, R]; see :class:`QFormerOutput`."""
    hidden_states: tuple[Tensor, ...] | None
    """Input of each layer, then the last output, where asked for."""
    cache: tuple[LayerCache, ...] | None
    """Of each layer, where asked for."""


class QFormerEncoder(nn.Module):
    """The blocks of a Q-Former, on rows that are embedded already.

    Set ``gradient_checkpointing``, as ``gradient_checkpointing_enable`` of a surrounding transformers model does, to
    keep only the input of each block in training and to compute the rest again in backward; not in calls that read or
    make a cache, which holds what would be computed again.
    """

    def __init__(self, config: QFormerConfig):
        super().__init__()
        self.layer = nn.ModuleList(QFormerLayer(config, index) for index in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(
        self,
        rows: Rows,
        mask: Tensor | None = None,
        image_BPW: Tensor | None = None,
        image_mask: Tensor | None = None,
        past: Sequence[LayerCache] | None = None,
        *,
        keep: bool = False,
        output_hidden_states: bool = False,
    ) -> EncoderOutput:
        """Run all blocks; the arguments are those of :class:`QFormerLayer`, ``past`` with an entry for each."""
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        recompute = recompute and past is None and not keep
        beams, importance, hidden_states, cache = None, [], [], []
        for index, layer in enumerate(self.layer):
            if output_hidden_states:
                hidden_states.append(rows.joined())
            if recompute:
                output = self._run_again_in_backward(layer, rows, mask, image_BPW, image_mask, beams)
            else:
                seen = None if past is None else past[index]
                output = layer(rows, mask, image_BPW, image_mask, beams, seen, keep=keep)
            rows, beams = output.rows, output.beams
            if output.importance is not None:
                importance.append(output.importance)
            cache.append(output.cache)
        if output_hidden_states:
            hidden_states.append(rows.joined())
        return EncoderOutput(
            rows=rows,
            beams=beams,
            importance=torch.stack(importance) if importance else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            cache=tuple(cache) if keep else None,
        )

    def _run_again_in_backward(self, layer, rows, mask, image_BPW, image_mask, beams) -> LayerOutput:
        # Reentrant checkpointing sees gradients only of tensors that are arguments and results themselves.
        def run(queries, text, image_BPW, *beams):
            output = layer(Rows(queries, text), mask, image_BPW, image_mask, BeamState(*beams) if beams else None)
            return *output.rows, output.importance, *(output.beams or ())

        queries, text, importance, *new_beams = self._gradient_checkpointing_func(run, *rows, image_BPW, *(beams or ()))
        state = None
        if new_beams:
            scores, routes, parents = new_beams
            state = BeamState(scores.detach(), routes, parents)
        return LayerOutput(Rows(queries, text), state, importance, cache=None)


class QFormerModel(nn.Module):
    """BERT-like bridge between an image encoder and text, with experts routed by beam search in its upper layers.

    Learned queries read the image through cross-attention and share self-attention with the text. In the routed layers
    a sample's queries are carried as N beams, each on its own route through the experts, and merged in the last.

    Args:
        config: a :class:`QFormerConfig`.

    Parameter names and shapes are those of the published checkpoints; built with the default configuration there are
    385, with 242,361,344 elements. ``with torch.device("meta")`` builds the model without memory.

    Source: BLIP-2, arXiv 2301.12597, section 3 (the Q-Former); Shazeer et al., arXiv 1701.06538 (the gate loss).
    """

    def __init__(self, config: QFormerConfig):
        super().__init__()
        if not isinstance(config, QFormerConfig):
            raise TypeError(
                f"config is a {type(config).__name__}; it must be a QFormerConfig (QFormerConfig.from_dict makes one)"
            )
        self.config = config
        self.query_tokens = nn.Parameter(torch.empty(1, config.num_query_tokens, config.hidden_size))
        self.ln_vision = nn.LayerNorm(config.encoder_width, eps=config.vision_layer_norm_eps)
        self.embeddings = QFormerEmbeddings(config)
        self.encoder = QFormerEncoder(config)
        if config.lm_head:
            self.cls = LanguageModelHead(config)
        self.reset_parameters()

    @classmethod
    def from_checkpoint(cls, source, **options) -> QFormerModel:
        """The model in a checkpoint of this package, transformers, LAVIS, the published mixture, or of a BERT.

        Arguments and errors are those of :func:`moe_zero.qformer.checkpoint.load_qformer`, which also says what it
        took, what it left and where the settings are from.
        """
        from moe_zero.qformer.checkpoint import load_qformer

        return load_qformer(source, **options)[0]

    def reset_parameters(self) -> None:
        """BERT's initialisation: normal weights with standard deviation ``initializer_range``, zero biases."""
        std = self.config.initializer_range
        nn.init.normal_(self.query_tokens, std=std)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if (words := self.embeddings.word_embeddings) is not None:
            with torch.no_grad():
                words.weight[words.padding_idx].zero_()
        if self.config.lm_head:
            nn.init.zeros_(self.cls.predictions.bias)

    def forward(
        self,
        query_embeds: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *,
        image_features: Tensor | None = None,
        cache: QFormerCache | None = None,
        causal: bool = False,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> QFormerOutput:
        """Queries alone, text alone, or both; or text that goes on from a cache.

        Args:
            query_embeds: [B, Q, D], any number of queries. With ``image_features`` they default to the learned
                ``query_tokens``.
            input_ids: [B, T], int64 token numbers.
            attention_mask: 1 (or True) to keep, 0 to drop: [B, T] over the text, or [B, Q + T]; [B, Q + T, Q + T] says
                it for each pair of positions, first the one that looks. ``None`` keeps all.
            encoder_hidden_states: [B, P, W], image features that are already normalised.
            encoder_attention_mask: [B, P] over the image tokens; ``None`` keeps all.
            image_features: [B, P, W], raw image features, instead of ``encoder_hidden_states``: ``ln_vision`` is
                applied first.
            cache: ``output.cache`` of an earlier call with the queries (and perhaps the beginning of the text). Then
                ``input_ids`` holds the tokens that follow, ``attention_mask`` is [B, T] over them or over all positions
                since the queries, and what comes out is what ``causal`` gives in one call over everything: queries
                don't see text, so neither they nor their beams are computed again.
            causal: text sees the queries and the text before it, queries don't see text. Always so with a ``cache``.
            use_cache: return a cache too. Needs queries or a ``cache``; of text, ``causal`` text alone can be gone on
                from.
            output_hidden_states: also return the input of each layer and the last output.

        Raises:
            ValueError: naming the argument, what it was and what would be right.
        """
        if image_features is not None:
            if encoder_hidden_states is not None:
                raise ValueError("image_features and encoder_hidden_states are both given; pass one of them")
            self._check_image("image_features", image_features)
            wanted = self.ln_vision.weight.dtype
            if image_features.dtype != wanted and not torch.is_autocast_enabled(image_features.device.type):
                raise ValueError(
                    f"image_features has dtype {image_features.dtype}, but the model's weights have {wanted}; convert "
                    "one of them, or run under torch.autocast"
                )
            encoder_hidden_states = self.ln_vision(image_features)
            if query_embeds is None:
                query_embeds = self.query_tokens.expand(image_features.shape[0], -1, -1)
        if cache is not None and (query_embeds is not None or encoder_hidden_states is not None):
            raise ValueError("cache holds the queries and what they saw; after it pass input_ids alone")
        if use_cache and cache is None and (query_embeds is None or (input_ids is not None and not causal)):
            missing = "queries" if query_embeds is None else "causal=True for its text"
            raise ValueError(f"use_cache is True, which needs {missing}")
        self._check_inputs(
            query_embeds, input_ids, attention_mask, encoder_hidden_states, encoder_attention_mask, cache
        )

        num_queries = 0 if query_embeds is None else query_embeds.shape[1]
        num_tokens = new_tokens = 0 if input_ids is None else input_ids.shape[1]
        if cache is not None:
            num_queries, num_tokens = cache.num_queries, cache.num_tokens + new_tokens
        rows = self.embeddings(query_embeds, input_ids, num_tokens - new_tokens)
        reference = rows.text if rows.queries is None else rows.queries
        sizes = (reference.shape[0], num_queries, num_tokens)
        if cache is None and not causal:
            mask = self_attention_mask(attention_mask, *sizes, reference.dtype)
        else:
            looking = new_tokens if cache is not None else num_queries + num_tokens
            mask = causal_mask(attention_mask, sizes, looking, reference.dtype, reference.device)
        image_mask = None
        if encoder_attention_mask is not None:
            image_mask = additive(encoder_attention_mask[:, None, None, :], reference.dtype)
        encoded = self.encoder(
            rows,
            mask,
            encoder_hidden_states,
            image_mask,
            None if cache is None else cache.layers,
            keep=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = None
        if use_cache:
            kept = QFormerCache(encoded.cache, *sizes)
        return QFormerOutput.of(encoded, kept)

    def next_word_logits(self, text_BTD: Tensor) -> Tensor:
        """Scores of the word after each row of text: [..., V] from [..., D] of ``last_hidden_state``.

        Raises:
            ValueError: the model was built without ``lm_head``.
        """
        if not self.config.lm_head:
            raise ValueError("the model has no language-modelling head; build it with lm_head=True")
        return self.cls(text_BTD, self.embeddings.word_embeddings.weight)

    def _check_image(self, name: str, image: Tensor) -> None:
        width = self.config.encoder_width
        if not image.is_floating_point():
            raise ValueError(f"{name} has dtype {image.dtype}; image tokens are floating-point numbers")
        if image.dim() != 3 or image.shape[-1] != width:
            raise ValueError(
                f"{name} has shape {tuple(image.shape)}; it must be [batch, image tokens, encoder_width = {width}]"
            )

    def _check_inputs(self, query_embeds, input_ids, attention_mask, image, image_mask, cache) -> None:
        config = self.config
        if query_embeds is None and input_ids is None:
            raise ValueError("neither query_embeds nor input_ids (nor image_features) is given; pass at least one")
        batch = {}
        if query_embeds is not None:
            if query_embeds.dim() != 3 or query_embeds.shape[-1] != config.hidden_size or not query_embeds.shape[1]:
                raise ValueError(
                    f"query_embeds has shape {tuple(query_embeds.shape)}; it must be "
                    f"[batch, queries (at least 1), hidden_size = {config.hidden_size}]"
                )
            batch["query_embeds"] = query_embeds.shape[0]
            if image is None and config.cross_attention_layers:
                raise ValueError(
                    "encoder_hidden_states is not given, but the queries look at an image in layers "
                    f"{list(config.cross_attention_layers)}; pass it, or image_features"
                )
        if input_ids is not None:
            self._check_ids(input_ids, 0 if cache is None else cache.num_tokens)
            batch["input_ids"] = input_ids.shape[0]
        if image is not None:
            self._check_image("encoder_hidden_states", image)
            batch["encoder_hidden_states"] = image.shape[0]
        if cache is not None:
            batch["cache"] = cache.batch
        for name, mask in (("attention_mask", attention_mask), ("encoder_attention_mask", image_mask)):
            if mask is not None and _can_be_read(mask) and not bool(((mask == 0) | (mask == 1)).all()):
                wrong = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
                raise ValueError(f"{name} holds {wrong}; it must be 1 (or True) where to keep and 0 where to drop")
        if image_mask is not None and (image is None or image_mask.shape != image.shape[:2]):
            wanted = "given only with image features" if image is None else f"{list(image.shape[:2])}"
            raise ValueError(f"encoder_attention_mask has shape {tuple(image_mask.shape)}; it must be {wanted}")
        if len(set(batch.values())) > 1:
            raise ValueError(
                f"the batch sizes differ: {', '.join(f'{name} has {size}' for name, size in batch.items())}"
            )

    def _check_ids(self, input_ids: Tensor, past_tokens: int) -> None:
        config = self.config
        if not config.use_text:
            raise ValueError("input_ids is given, but the model was built without text (use_text is False)")
        if input_ids.dim() != 2 or not input_ids.shape[1]:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; it must be [batch, text tokens (at least 1)]"
            )
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids has dtype {input_ids.dtype}; token numbers are int64 or int32")
        if (tokens := past_tokens + input_ids.shape[1]) > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"input_ids has {tokens} tokens; max_position_embeddings is {limit}")
        if input_ids.numel() and _can_be_read(input_ids):
            low, high = (bound.item() for bound in input_ids.aminmax())
            if low < 0 or high >= config.vocab_size:
                raise ValueError(
                    f"input_ids holds {low if low < 0 else high}; token numbers are 0 to {config.vocab_size - 1} "
                    f"(vocab_size is {config.vocab_size})"
                )


def _can_be_read(x: Tensor) -> bool:
    """Whether looking at the values of an argument stalls no device and breaks no graph."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def causal_mask(
    mask: Tensor | None, sizes: tuple[int, int, int], looking: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Additive [B, 1, looking, Q + T] for the last ``looking`` positions of ``sizes`` B, Q, T.

    Args:
        mask: [B, n], 0 at padding, over the last n positions: those that look, the text, or all.
    """
    batch, num_queries, num_tokens = sizes
    length = num_queries + num_tokens
    keep_BS = torch.ones(batch, length, dtype=torch.bool, device=device)
    if mask is not None:
        if mask.shape not in [(batch, size) for size in (looking, num_tokens, length)]:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; over {num_tokens} tokens of causal text it must be "
                f"{[batch, num_tokens]}"
            )
        keep_BS = torch.cat([keep_BS[:, : length - mask.shape[1]], mask != 0], dim=1)
    return additive(causal_keep(keep_BS, num_queries, looking)[:, None], dtype)


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive attention mask: 0 where ``keep`` is not 0, else ``DROPPED``."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(keep == 0, DROPPED)


def self_attention_mask(
    mask: Tensor | None, batch: int, num_queries: int, num_text: int, dtype: torch.dtype
) -> Tensor | None:
    """Additive [B, 1, 1 or S, S] from a mask over the text, over all positions, or over pairs of positions."""
    if mask is None:
        return None
    length = num_queries + num_text
    if mask.shape == (batch, length, length):
        return additive(mask[:, None], dtype)
    if num_queries and mask.shape == (batch, num_text):
        mask = torch.cat([mask.new_ones(batch, num_queries), mask], dim=1)
    if mask.shape != (batch, length):
        shapes = [[batch, num_text], [batch, length], [batch, length, length]]
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; for {num_queries} queries and {num_text} tokens it must "
            f"be one of {', '.join(map(str, shapes if num_queries and num_text else shapes[1:]))}"
        )
    return additive(mask[:, None, None], dtype)
