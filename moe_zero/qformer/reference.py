"""The Q-Former as it was published, operation by operation: the definition that the fast model is held to.

Nothing here is shared or skipped: queries and text in one tensor and sliced, keys and values of the image for every
beam, every expert on every row, a beam search in Python that reads its scores back sample by sample. Read it to learn
what :class:`~moe_zero.qformer.QFormerModel` computes; it runs on that model's weights.

Names: B samples, N beams, K = N - 1 routed beams, Q queries, S positions (queries, then text), R routed experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_zero.qformer.attention import QFormerAttention
from moe_zero.qformer.layer import QFormerLayer
from moe_zero.qformer.model import DROPPED, QFormerModel, QFormerOutput


def qformer_reference(
    model: QFormerModel,
    query_embeds: Tensor,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor | None = None,
    *,
    output_hidden_states: bool = False,
) -> QFormerOutput:
    """What ``model`` computes without dropout, for queries with or without text; arguments and result are the model's.

    ``gate_importance`` is left out.
    """
    config, Q = model.config, query_embeds.shape[1]
    if config.routing != "post_route":
        raise ValueError(
            f"routing is {config.routing!r}; the published model, and so this definition, has 'post_route'"
        )
    x = query_embeds
    if input_ids is not None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        text = model.embeddings.word_embeddings(input_ids) + model.embeddings.position_embeddings(positions)
        x = torch.cat([query_embeds, text], dim=1)
    x = model.embeddings.LayerNorm(x)
    B, S = x.shape[:2]

    mask = torch.ones(B, S, device=x.device)
    if attention_mask is not None and attention_mask.dim() == 3:
        mask = attention_mask
    elif attention_mask is not None:
        mask[:, S - attention_mask.shape[1] :] = attention_mask
    image, image_mask = encoder_hidden_states, encoder_attention_mask
    if image_mask is None:
        image_mask = torch.ones(image.shape[:2], device=image.device)

    hidden_states, gate_loss, beams = [x], 0.0, None
    for index, layer in enumerate(model.encoder.layer):
        repeats = x.shape[0] // B
        x = attend(layer.attention, x, x, mask.repeat_interleave(repeats, dim=0))
        queries, text = x[:, :Q], x[:, Q:]
        if layer.crossattention is not None:
            rows = image.repeat_interleave(repeats, dim=0)
            queries = attend(layer.crossattention, queries, rows, image_mask.repeat_interleave(repeats, dim=0))
        text_out = layer.output(layer.intermediate(text), text)
        if layer.routes_beams:
            last = index == config.routed_layers[-1]
            queries, text_out, beams, loss = route(layer, config, queries, text_out, beams, last=last)
            gate_loss = gate_loss + loss
        else:
            queries = layer.expert_ln(layer.experts(queries) + queries)
        x = torch.cat([queries, text_out], dim=1)
        hidden_states.append(x)

    return QFormerOutput(
        last_hidden_state=x,
        beam_scores=None if beams is None else torch.stack([score for ((score, _), *_) in beams]),
        expert_route=None
        if beams is None
        else torch.tensor([experts for ((_, experts), *_) in beams], device=x.device),
        gate_loss=torch.as_tensor(gate_loss),
        gate_importance=None,
        hidden_states=tuple(hidden_states) if output_hidden_states else None,
    )


def attend(block: QFormerAttention, x: Tensor, source: Tensor, keep: Tensor) -> Tensor:
    """Scaled dot-product attention, written out, with residual and LayerNorm. ``keep``: [B, S], or for each pair."""

    def heads(t: Tensor) -> Tensor:
        return t.view(*t.shape[:2], block.num_heads, -1).transpose(1, 2)

    query, key, value = heads(block.self.query(x)), heads(block.self.key(source)), heads(block.self.value(source))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    keep = keep[:, None] if keep.dim() == 3 else keep[:, None, None]
    scores = scores + (1.0 - keep.to(scores.dtype)) * DROPPED
    context = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(x.shape)
    return block.output(context, x)


def route(layer: QFormerLayer, config, x: Tensor, text: Tensor, beams, *, last: bool):
    """One routed layer. ``beams``: for each sample the (score, experts taken) of its K routed beams, best first."""
    N, K, R = config.num_beams, config.num_beams - 1, config.num_experts - 1
    first = beams is None
    B = x.shape[0] if first else len(beams)
    is_universal = torch.arange(x.shape[0], device=x.device) % N == K
    routed, universal = (x, x) if first else (x[~is_universal], x[is_universal])

    outputs = torch.stack([expert(routed) for expert in layer.experts.experts][:R], dim=1)
    p = layer.experts.gate(outputs.mean(dim=2)).squeeze(-1).softmax(dim=-1)  # [rows, R]
    importance = p.sum(dim=0)
    gate_loss = (importance.std() / importance.mean()) ** 2 if R > 1 else 0.0
    universal_out = layer.experts.experts[R](universal)

    new_beams, rows, text_rows = [], [], []
    for b in range(B):
        parents = range(1) if first else range(K)
        candidates = []
        for parent in parents:
            for expert in range(R):
                row = b if first else b * K + parent
                score, taken = p[row, expert].detach(), []
                if not first:
                    parent_score, taken = beams[b][parent]
                    score = torch.exp(torch.log(score) + torch.log(parent_score))
                candidates.append((score, row, parent, expert, taken))
        # Python's sort is stable: equal scores keep the order of beams, then of experts.
        best = sorted(candidates, key=lambda candidate: -candidate[0].item())[: 1 if last else K]
        new_beams.append([(score, [*taken, expert]) for score, _, _, expert, taken in best])
        for place, (_, row, parent, expert, _) in enumerate(best):
            weight = {"ffn_prob": p[row, expert], "scaled_prob": R * p[row, expert], "one_hot": 1.0}[config.weight_type]
            y = weight * outputs[row, expert]
            residual = x[b] if first else x[b * N + (parent if config.residual_from == "parent" else place)]
            rows.append(layer.expert_ln(y + residual))
            text_rows.append(text[b] if first else text[b * N + parent])
        rows.append(layer.expert_ln(universal_out[b] + universal[b]))
        text_rows.append(text[b] if first else text[b * N + K])

    queries, text = torch.stack(rows), torch.stack(text_rows)
    if last:  # the best routed beam and the universal one become one
        share = 1.0 if config.merge == "sum" else 0.5
        queries, text = (share * (part[0::2] + part[1::2]) for part in (queries, text))
    return queries, text, new_beams, gate_loss
