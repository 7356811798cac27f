"""Golden files: inputs, weights, outputs and gradients of a known-good run, to compare a machine with.

A golden file is a safetensors file. Its metadata key ``case`` is JSON with the configuration; its tensors are
``param.NAME`` (every parameter but ``query_tokens`` and ``ln_vision``), ``in.*`` (the arguments of the model, and
``in.loss_projection`` of the loss ``(last_hidden_state * loss_projection).sum() / sqrt(numel) + 0.05 * gate_loss``),
``out.*`` (results, ``out.hidden_states.N`` among them) and ``grad.*`` (of parameters and float inputs).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_zero.qformer.config import QFormerConfig
from moe_zero.qformer.model import QFormerModel, QFormerOutput

GATE_LOSS_WEIGHT = 0.05
OUTPUT_TOLERANCE = 1e-5
"""Largest absolute difference of outputs and hidden states in fp32."""
GRADIENT_TOLERANCE = 1e-4
"""Largest |gradient - golden| / |golden| of any tensor in fp32."""


@dataclass(frozen=True)
class GoldenCase:
    """One golden file in memory."""

    name: str
    config: QFormerConfig
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, path: str | Path) -> GoldenCase:
        """Read a file; ``ValueError`` names it where it is not one."""
        from safetensors import SafetensorError, safe_open  # an extra: only who compares needs it

        path = Path(path)
        try:
            with safe_open(path, framework="pt") as file:
                case = json.loads((file.metadata() or {})["case"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a golden file: {error!r}") from error
        known = {field.name for field in fields(QFormerConfig)}
        settings = {key: value for key, value in case.items() if key in known}
        return cls(path.stem, QFormerConfig(num_query_tokens=case["queries"], **settings), tensors)

    def model(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> QFormerModel:
        """The model with the file's weights, in training mode (the files were made without dropout)."""
        model = QFormerModel(self.config)
        weights = self.group("param")
        left = set(model.load_state_dict(weights, strict=False).missing_keys) - {
            "query_tokens",
            "ln_vision.weight",
            "ln_vision.bias",
        }
        if left:
            raise ValueError(f"golden file {self.name} lacks parameters: {', '.join(sorted(left))}")
        return model.to(device, dtype)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors ``prefix.NAME``, by NAME."""
        return {key.removeprefix(prefix + "."): t for key, t in self.tensors.items() if key.startswith(prefix + ".")}

    def inputs(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Keyword arguments of the model; those that are floats require a gradient."""
        names = {
            "query_embeds": "query_embeds",
            "input_ids": "input_ids",
            "attention_mask": "text_attention_mask",
            "encoder_hidden_states": "encoder_hidden_states",
            "encoder_attention_mask": "encoder_attention_mask",
        }
        inputs = {argument: self.tensors[f"in.{name}"].to(device) for argument, name in names.items()}
        return {
            name: t.to(dtype).detach().requires_grad_() if t.is_floating_point() else t for name, t in inputs.items()
        }

    def loss(self, output: QFormerOutput, *, gate_loss_weight: float = GATE_LOSS_WEIGHT) -> Tensor:
        """The loss that the file's gradients belong to."""
        projection = self.tensors["in.loss_projection"].to(output.last_hidden_state)
        projected = (output.last_hidden_state * projection).sum() / projection.numel() ** 0.5
        return projected + gate_loss_weight * output.gate_loss


@dataclass(frozen=True)
class GoldenReport:
    """How far a run is from a golden file."""

    name: str
    output_error: float
    """Largest absolute difference of the outputs."""
    hidden_state_error: float
    """Largest absolute difference over all hidden states."""
    gradient_error: float
    """Largest relative difference, by norm, of any gradient."""
    worst_gradient: str
    routes_agree: bool

    @property
    def passed(self) -> bool:
        """Whether every figure is within its tolerance; NaN is not."""
        return (
            self.routes_agree
            and self.output_error <= OUTPUT_TOLERANCE
            and self.hidden_state_error <= OUTPUT_TOLERANCE
            and self.gradient_error <= GRADIENT_TOLERANCE
        )


def golden_files(directory: str | Path) -> list[Path]:
    """The golden files of a directory, sorted; a directory without any is a ``FileNotFoundError``."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no golden files (*.safetensors) in {Path(directory).absolute()}")
    return files


def compare(
    case: GoldenCase,
    model: nn.Module,
    device: torch.device | str = "cpu",
    *,
    run: Callable[..., QFormerOutput] | None = None,
) -> GoldenReport:
    """Run ``model`` on the inputs of ``case``, forward and backward, and compare with its results.

    Args:
        case: a golden file.
        model: a :class:`QFormerModel` with its weights, or the same compiled.
        device: where ``model`` is.
        run: what to call with the inputs instead of ``model``; it must use the parameters of ``model``.
    """
    inputs = case.inputs(device)
    output = (run or model)(**inputs, output_hidden_states=True)
    loss = case.loss(output)
    loss.backward()

    golden = case.group("out")
    outputs = {"last_hidden_state": output.last_hidden_state, "beam_scores": output.beam_scores}
    outputs |= {"gate_loss": output.gate_loss.reshape(1), "loss": loss.reshape(1)}
    hidden = {f"hidden_states.{i}": state for i, state in enumerate(output.hidden_states)}
    # A compiled module prefixes its parameters' names.
    gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    gradients |= {name: t.grad for name, t in inputs.items()}
    worst, worst_name = max(_gradient_errors(gradients, case.group("grad")), key=lambda item: _nan_last(item[0]))
    return GoldenReport(
        name=case.name,
        output_error=_largest_difference(outputs, golden),
        hidden_state_error=_largest_difference(hidden, golden),
        gradient_error=worst,
        worst_gradient=worst_name,
        routes_agree=torch.equal(output.expert_route.cpu(), golden["expert_route"]),
    )


def _largest_difference(tensors: dict[str, Tensor], golden: dict[str, Tensor]) -> float:
    differences = [(t.detach().double().cpu() - golden[name].double()).abs().max() for name, t in tensors.items()]
    return torch.stack(differences).max().item()  # max of a tensor keeps NaN, max of a list may not


def _gradient_errors(gradients: dict[str, Tensor | None], golden: dict[str, Tensor]) -> Iterator[tuple[float, str]]:
    for name, expected in golden.items():
        if (gradient := gradients[name]) is None:
            yield float("inf"), name
            continue
        scale = expected
        if name.endswith(".key.bias"):
            # Softmax does not see a shift of all scores, so this gradient is 0 but for rounding; what the rounding is
            # small against is the gradient of the weight beside it.
            scale = golden[name.removesuffix("bias") + "weight"]
        difference = gradient.detach().double().cpu() - expected.double()
        yield (difference.norm() / scale.double().norm()).item(), name


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value
