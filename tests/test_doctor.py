"""``moe-zero doctor``, as a user runs it."""

import builtins
import json

import pytest
import torch
from safetensors.torch import save_file

from moe_zero import doctor
from moe_zero.qformer.golden import GoldenCase, golden_files


def test_each_missing_thing_has_a_cost():
    for finding in doctor.examine():
        assert finding.detail
        assert finding.present or finding.cost, finding


def test_text_names_what_matters(capsys):
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for word in (
        "moe-zero",
        torch.__version__,
        "_flat_plan",
        "_ops_cpu",
        "_ops_cuda",
        "Triton",
        "gloo",
        "bf16",
        "cores",
    ):
        assert word in text


def test_json_is_one_object(capsys):
    assert doctor.main(["--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"versions", "GPU", "extensions", "kernels", "CPU", "distributed", "extras"} == {
        f["topic"] for f in findings
    }


def test_missing_triton_is_reported_and_not_fatal(monkeypatch, capsys):
    def no_triton(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(doctor.importlib, "import_module", no_triton)
    assert doctor.main([]) == 0
    assert "cannot be imported: No module named 'triton'" in capsys.readouterr().out


def test_golden_files_pass(golden_directory, capsys):
    assert doctor.main(["--golden", str(golden_directory), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count("agree") == len(golden_files(golden_directory))
    assert "FAILED" not in text


def test_a_golden_file_that_disagrees_fails(golden_directory, tmp_path, capsys):
    source = golden_files(golden_directory)[0]
    case = GoldenCase.load(source)
    case.tensors["out.last_hidden_state"] += 1e-3
    settings = case.config.to_dict() | {"queries": case.config.num_query_tokens}
    settings.pop("num_query_tokens")
    save_file(case.tensors, tmp_path / source.name, metadata={"case": json.dumps(settings)})
    assert doctor.main(["--golden", str(tmp_path), "--device", "cpu", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["golden"]
    assert not report["passed"]
    assert report["output_error"] == pytest.approx(1e-3, rel=0.1)
    assert report["routes_agree"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--golden", "no-such-folder"], "no golden files"),
        (["--device", "cpu"], "--device says where --golden runs"),
        (["--golden", "tests", "--device", "abacus"], "abacus"),
    ],
)
def test_a_bad_argument_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        doctor.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_without_safetensors_the_command_to_install_it_is_named(golden_directory, monkeypatch, capsys):
    real_import = builtins.__import__

    def no_safetensors(name, *args, **kwargs):
        if name.split(".")[0] == "safetensors":
            raise ImportError("No module named 'safetensors'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_safetensors)
    with pytest.raises(SystemExit):
        doctor.main(["--golden", str(golden_directory), "--device", "cpu"])
    assert "pip install safetensors" in capsys.readouterr().err
