"""The report of ``moe-zero bench``: what it says of measurements, and that the command measures."""

import json

import pytest

from moe_zero.benchmarks import report
from moe_zero.cli import main


def entry(case, rival, median, **extra):
    params = {"rival": rival} if rival else None
    return {
        "name": f"test_x[{rival}]",
        "group": case,
        "params": params,
        "extra_info": extra,
        "stats": {"median": median, "iqr": median / 10, "rounds": 5},
    }


@pytest.fixture
def results(tmp_path):
    entries = [
        entry("gate, T=4", "ours", 2e-3),
        entry("gate, T=4", "ours, bf16", 1e-3),
        entry("gate, T=4", "slow", 9e-3),
        entry("gate, T=4", "quick", 3e-3),
        entry("alone", "ours", 5e-6),
        entry("memory", None, 1.0, peak_mib=123.4),
    ]
    path = tmp_path / "earlier.json"
    zero3 = [{"method": "FSDP2", "seconds": 2.0, "peak_mib": 3000.0, "sent_mib": 9.0, "losses": [0.5]}]
    path.write_text(json.dumps({"benchmarks": entries, "datetime": "2026-01-02T03:04:05", "zero3": zero3}))
    return path


def test_a_ratio_compares_the_fastest_rival_with_each_of_ours(results):
    gate, alone = report.cases_of(report.rows_of(json.loads(results.read_text())))
    assert [row.name for row in gate.rows] == ["ours, bf16", "ours", "quick", "slow"]
    assert gate.rival.name == "quick"
    assert gate.ratio(gate.ours) == pytest.approx(1.5)
    assert alone.rival is None and alone.ratio(alone.ours) is None


def test_report_from_earlier_results(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert main(["bench", "--from-json", str(results), "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    assert "2026-01-02" in text
    assert "| gate, T=4 | 2 ms | 3 ms | quick | 1.50 x |" in text
    assert "| ours, bf16 | 1 ms | 100 µs | 5 | 3.00 x |" in text
    assert "peak_mib 123" in text and "| FSDP2 | 2 | 3000 | 9 |  |  | 0.5000000 |" in text
    assert (out / "report.png").stat().st_size > 5000
    assert str(out / "report.md") in capsys.readouterr().out


@pytest.mark.slow
def test_a_suite_runs_from_the_command(tmp_path, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_beam_step")  # the quickest cases of the suite
    assert main(["bench", "beam_moe", "--out", str(tmp_path)]) == 0
    cases = report.cases_of(report.rows_of(json.loads((tmp_path / "results.json").read_text())))
    assert len(cases) == 2 and all(case.ours and case.rival for case in cases)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "there is no suite nonsense; there are beam_moe"),
        (["--from-json", "none.json"], "none.json is not"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert said in capsys.readouterr().err
