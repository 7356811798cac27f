"""The readable definition against the golden files, and the fast model against it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import small_qformer
from moe_zero.qformer import QFormerModel
from moe_zero.qformer.golden import GoldenCase, compare, golden_files
from moe_zero.qformer.reference import qformer_reference

SMALL = replace(small_qformer.SMALL, num_experts=5, num_beams=4)


def test_reference_is_the_published_model(golden_directory):
    for path in golden_files(golden_directory):
        case = GoldenCase.load(path)
        model = case.model()
        report = compare(case, model, run=partial(qformer_reference, model))
        assert report.passed, report


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 2, "num_beams": 2},
        {"num_experts": 8, "num_beams": 8},
        {"weight_type": "one_hot"},
        {"weight_type": "scaled_prob", "merge": "mean"},
        {"residual_from": "parent"},
        {"moe_layers": (2,)},
        {"moe_layers": (0, 2)},
        {"num_experts": 1},
    ],
    ids=str,
)
def test_model_equals_the_reference_in_double_precision(changes):
    model = QFormerModel(replace(SMALL, cross_attention_layers=None, **changes)).double()
    B, T, P = 3, 6, 7
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, 3:] = 0
    image_mask = torch.ones(B, P, dtype=torch.int64)
    image_mask[1, 5:] = 0
    inputs = {
        "query_embeds": torch.randn(B, 5, 24, dtype=torch.float64),
        "input_ids": torch.randint(1, 50, (B, T)),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(B, P, 20, dtype=torch.float64),
        "encoder_attention_mask": image_mask,
    }
    gradients = []
    for run in (model, partial(qformer_reference, model)):
        model.zero_grad()
        output = run(**inputs, output_hidden_states=True)
        ((output.last_hidden_state * torch.arange(24)).sum() + output.gate_loss).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        if run is model:
            expected = output
    for state, expected_state in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)  # routing is fp32 in the model
    if model.config.routed_layers:
        assert torch.equal(output.expert_route, expected.expert_route)
        torch.testing.assert_close(output.beam_scores.float(), expected.beam_scores.float())
    for name, gradient in gradients[0].items():
        scale = gradients[1][name].norm() + 1e-6 * gradients[1]["encoder.layer.0.attention.self.value.weight"].norm()
        assert (gradient - gradients[1][name]).norm() <= 1e-4 * scale, name
