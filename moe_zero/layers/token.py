"""Experts routed token by token, as in Switch or Mixtral, or sequence by sequence.

Legend of shape suffixes: T tokens, Q tokens of a sequence, D hidden size, F FFN width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_zero.layers.beam import importance_loss
from moe_zero.layers.experts import Experts
from moe_zero.layers.ffn import GeluFeedForward
from moe_zero.ops._library import check_integer, check_tensor
from moe_zero.ops.gate import GateOutput, gate
from moe_zero.ops.gelu_ffn import gelu_ffn

GRANULARITIES = ("token", "sequence")
LOSSES = ("switch", "importance", "z")


class TokenMoE(nn.Module):
    """Each token, or each sequence, goes to the K experts that the gate finds most probable, weighted accordingly.

    Args:
        hidden_size: D.
        intermediate_size: F, the inner width of each expert.
        num_experts: E.
        top_k: K, 1 to E.
        granularity: ``"token"``: the gate sees every token; ``"sequence"``: it sees the mean over a sequence, whose
            tokens all go the same way.
        renormalize: divide the K weights by their sum, so that experts that are equal act as one.
        shared_expert: add one more expert that every token passes, unweighted.
        stacked: keep the experts' weights as one tensor [E, ...] of each kind; see :class:`Experts`.
        bias, approximate: as in :class:`GeluFeedForward`.
        dropout: on the result.

    State dict: ``gate.weight`` [E, D], ``experts.{0..E-1}.dense{1,2}.{weight,bias}`` (or stacked), and
    ``shared_expert.dense{1,2}.{weight,bias}``.

    Source: Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961; Dai et al., arXiv 2401.06066 (shared).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        granularity: str = "token",
        renormalize: bool = True,
        shared_expert: bool = False,
        stacked: bool = False,
        bias: bool = True,
        approximate: str = "none",
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_integer(
            hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts, top_k=top_k
        )
        if hidden_size < 1 or intermediate_size < 1:
            raise ValueError(
                f"hidden_size is {hidden_size} and intermediate_size {intermediate_size}; both must be at least 1"
            )
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; it must be at least 1")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}; it must be between 1 and num_experts, {num_experts}")
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity is {granularity!r}; it must be 'token' or 'sequence'")
        self.top_k = top_k
        self.granularity = granularity
        self.renormalize = renormalize
        self.approximate = approximate
        options = {"bias": bias, "approximate": approximate, "device": device, "dtype": dtype}
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, stacked=stacked, **options)
        self.shared_expert = GeluFeedForward(hidden_size, intermediate_size, **options) if shared_expert else None
        self.dropout = nn.Dropout(dropout)
        self.routing: GateOutput | None = None
        """Routing of the last forward pass, which :meth:`loss` reads. Not part of the state dict."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]; every row is a token, and with ``granularity="sequence"`` [..., Q, D] are sequences."""
        check_tensor(x=x)
        if x.shape[-1:] != self.gate.weight.shape[1:]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but the layer was built for hidden size {self.gate.weight.shape[1]}"
            )
        x_TD = x.reshape(-1, x.shape[-1])
        options = {"renormalize": self.renormalize}
        if self.granularity == "token":
            self.routing = gate(x_TD, self.gate.weight, self.top_k, **options)
            ids_TK, weights_TK = self.routing.ids, self.routing.weights
        else:
            if x.dim() < 2:
                raise ValueError(f"x has shape {tuple(x.shape)}; to route sequences it must be [..., Q, hidden size]")
            self.routing = gate(x.reshape(-1, *x.shape[-2:]), self.gate.weight, self.top_k, **options)
            choices = (self.routing.ids, self.routing.weights)
            ids_TK, weights_TK = (choice.repeat_interleave(x.shape[-2], dim=0) for choice in choices)
        y_TD = gelu_ffn(x_TD, ids_TK, weights_TK, *self.experts.weights(), approximate=self.approximate)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        return self.dropout(y_TD.view(x.shape))

    def loss(self, kind: str = "switch") -> Tensor:
        """An auxiliary loss on the routing of the last forward pass, [], fp32, without a weight.

        ``"switch"``: E * sum over the experts of (fraction of choices) * (mean probability); 1 when balanced (arXiv
        2101.03961, equation 4). ``"importance"``: squared coefficient of variation of the summed probabilities; 0 when
        balanced (arXiv 1701.06538, equation 6). ``"z"``: mean squared log-sum-exp of the logits (arXiv 2202.08906,
        equation 5).
        """
        if kind not in LOSSES:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(map(repr, LOSSES))}")
        if self.routing is None:
            raise RuntimeError("the layer has routed nothing yet; its loss is that of the last forward pass")
        tokens, experts = self.routing.probs.shape
        if kind == "importance":
            return importance_loss(self.routing.importance)
        if kind == "z":
            return self.routing.logsumexp.square().sum() / max(tokens, 1)
        choices = self.routing.counts.to(self.routing.importance.dtype) / max(tokens * self.top_k, 1)
        return experts * (choices * self.routing.importance).sum() / max(tokens, 1)

    def __getstate__(self) -> dict:
        # The routing belongs to a graph, which can be neither copied nor pickled.
        return {**self.__dict__, "routing": None}


def balancing_loss(model: nn.Module, kind: str = "switch") -> Tensor:
    """Sum of :meth:`TokenMoE.loss` over the layers of ``model`` that routed something.

    Raises:
        ValueError: if there is no :class:`TokenMoE` in the model, or none has run.
    """
    layers = [m for m in model.modules() if isinstance(m, TokenMoE)]
    losses = [layer.loss(kind) for layer in layers if layer.routing is not None]
    if not losses:
        state = "none of them has run yet" if layers else "none of its modules is a TokenMoE"
        raise ValueError(f"the model has no routing to balance: {state}")
    return torch.stack(losses).sum()


def token_moe_reference(layer: TokenMoE, x: Tensor) -> Tensor:
    """The definition of :class:`TokenMoE` (without dropout): every expert on every token, then the weights."""
    x_TD = x.reshape(-1, x.shape[-1])
    gated = x if layer.granularity == "token" else x.mean(dim=-2, keepdim=True).expand_as(x)
    probs_TE = F.linear(gated.reshape(x_TD.shape), layer.gate.weight).softmax(-1)
    weights_TK, ids_TK = probs_TE.topk(layer.top_k, dim=-1)
    if layer.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    weights_TE = torch.zeros_like(probs_TE).scatter(1, ids_TK, weights_TK)
    y_TED = torch.stack([expert(x_TD) for expert in layer.experts], dim=1)
    y_TD = torch.einsum("te,ted->td", weights_TE, y_TED)
    if layer.shared_expert is not None:
        y_TD = y_TD + layer.shared_expert(x_TD)
    return y_TD.view(x.shape)
