"""The table of registers, shared memory and matrix instructions."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process and cannot be compiled", allow_module_level=True)

from moe_zero.triton_kernels import survey


def test_a_row_for_each_launch(monkeypatch, capsys):
    monkeypatch.setattr(
        survey, "CASES", {"ffn": lambda: survey.run_ffn(512), "beams": lambda: survey.run_beam_step(2, 2)}
    )
    survey.main(["--capability", "90"])
    header, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert {row["epilogue"] for row in table if row["kernel"] == "product_kernel"} == {
        "affine",
        "gelu",
        "gelu_backward",
    }
    assert all(row["spills"] == "0" and int(row["registers"]) > 0 for row in table)
    assert [row["case"] for row in table if row["kernel"] == "beam_step_kernel"] == ["beams"]
    assert {row["matrix"] for row in table if row["kernel"] == "weight_gradient_kernel"} == {"wgmma"}
