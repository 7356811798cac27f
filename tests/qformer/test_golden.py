"""The Q-Former against recorded results of the published code."""

import json
from pathlib import Path

import pytest
import torch

from moe_zero.qformer.golden import GoldenCase, compare, golden_files

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [path.stem for path in golden_files(GOLDEN)]
TRACES = json.loads((GOLDEN / "train_trace.json").read_text())


@pytest.fixture(scope="module", params=CASES)
def case(request) -> GoldenCase:
    return GoldenCase.load(GOLDEN / f"{request.param}.safetensors")


def test_there_are_golden_files_for_each_weight_type():
    assert {GoldenCase.load(path).config.weight_type for path in golden_files(GOLDEN)} == {"ffn_prob", "one_hot"}


def test_outputs_hidden_states_routes_and_gradients(case):
    report = compare(case, case.model())
    assert report.output_error <= 1e-5
    assert report.hidden_state_error <= 1e-5
    assert report.routes_agree
    assert report.gradient_error <= 1e-4, report.worst_gradient
    assert report.passed


def test_every_parameter_of_the_file_has_a_gradient_in_it(case):
    assert set(case.group("param")) <= set(case.group("grad"))


@pytest.mark.parametrize("name", ["encoder.layer.11.output.dense.weight", "encoder.layer.7.experts.gate.weight"])
def test_a_wrong_weight_is_seen(case, name):
    model = case.model()
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(1.01)
    assert not compare(case, model).passed


def test_a_nan_is_not_within_tolerance(case):
    model = case.model()
    with torch.no_grad():
        model.encoder.layer[3].experts.dense1.bias[0] = float("nan")
    assert not compare(case, model).passed


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["case"])
def test_training_trace(trace):
    case = GoldenCase.load(GOLDEN / f"{trace['case']}.safetensors")
    model, inputs = case.model(), case.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for expected in trace["trace"]:
        optimizer.zero_grad()
        loss = case.loss(model(**inputs), gate_loss_weight=0.0)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-4)
        assert norm.item() == pytest.approx(expected["grad_norm"], rel=1e-4)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_close_to_fp32_where_routes_agree(case, dtype):
    model, inputs = case.model(), case.inputs()
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    case.loss(output).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert torch.isfinite(output.last_hidden_state).all()
    same_route = (output.expert_route == case.tensors["out.expert_route"]).all(dim=1)
    assert same_route.any()
    expected = case.tensors["out.last_hidden_state"][same_route]
    error = (output.last_hidden_state[same_route] - expected).norm() / expected.norm()
    assert error <= 2e-2


@pytest.mark.slow
def test_traced_whole_passes():
    """No graph break and the same figures; that the generated code computes the same is in test_model.py."""
    case = GoldenCase.load(GOLDEN / "uniroute_e5_b3_padded.safetensors")
    assert compare(case, torch.compile(case.model(), fullgraph=True, backend="aot_eager")).passed


def test_a_file_that_is_not_golden_is_named(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"broken\.safetensors is not a golden file"):
        GoldenCase.load(path)
