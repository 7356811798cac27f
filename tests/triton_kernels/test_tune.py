"""The tool that rewrites the tables of tiles, as far as it goes without a GPU."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process and cannot be compiled", allow_module_level=True)

from moe_zero.triton_kernels import tune, tuning
from moe_zero.triton_kernels.resources import SHARED_MEMORY_LIMIT
from moe_zero.triton_kernels.tuning import ProductConfig


@pytest.fixture
def table(tmp_path):
    return Path(shutil.copy(tuning.__file__, tmp_path / "tuning.py"))


def test_writing_the_present_tables_changes_nothing(table):
    before = table.read_text()
    tune.rewrite(table, tune.present_tables())
    assert table.read_text() == before


def test_a_new_tile_lands_in_its_row_alone(table):
    tables = tune.present_tables()
    (limit, config), *rest = tables["PRODUCTS"][90]
    tables["PRODUCTS"][90] = ((limit, replace(config, num_stages=7)), *rest)
    before = table.read_text().splitlines()
    tune.rewrite(table, tables)
    after = table.read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("        (16, ProductConfig(16, 64, 128, 4, 4)),", "        (16, ProductConfig(16, 64, 128, 4, 7)),")
    ]
    names = {}
    exec(compile(table.read_text(), "tuning.py", "exec"), {"__name__": "moe_zero.triton_kernels.tuning"}, names)
    assert names["PRODUCTS"][90][0][1].num_stages == 7


def test_a_file_without_the_marks_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("PRODUCTS = {}\n")
    with pytest.raises(ValueError, match="does not hold the lines"):
        tune.rewrite(path, tune.present_tables())


@pytest.mark.parametrize("kind", tune.KINDS)
@pytest.mark.parametrize("capability", sorted(SHARED_MEMORY_LIMIT))
def test_candidates_are_of_the_height_of_the_rows(kind, capability):
    for rows in (16, 512, 8192):
        found = list(tune.candidates(kind, capability, rows))
        assert 4 <= len(found) == len(set(found))
        assert kind != "PRODUCTS" or all(config.block_m <= max(16, rows) for config in found)


def test_only_a_clearly_faster_tile_replaces_the_present_one():
    present, close, fast = (ProductConfig(16, 64, 128, 4, stages) for stages in (3, 4, 5))
    seconds = {present: 1.0, close: 0.99, fast: 0.5}
    assert tune.fastest(present, [close], seconds.get) == (present, 1.0)
    assert tune.fastest(present, [close, fast], seconds.get) == (fast, 2.0)


def test_a_tile_that_spills_or_overflows_shared_memory_is_refused():
    problem = tune.Problem(512)
    assert tune.misfit("PRODUCTS", 90, ProductConfig(64, 64, 64, 4, 3), problem) == ""
    assert "shared memory" in tune.misfit("PRODUCTS", 120, ProductConfig(64, 64, 128, 4, 5), problem)
    assert "spills" in tune.misfit("PRODUCTS", 120, ProductConfig(64, 128, 128, 8, 4), problem)


def test_dry_run_writes_nothing(table, capsys):
    before = table.read_text()
    tune.main(["--dry-run", "--kind", "WEIGHT_GRADIENTS", "--rows", "64", "--most", "1", "--table", str(table)])
    printed = capsys.readouterr().out
    assert "fits" in printed and "nothing written" in printed and table.read_text() == before


def test_timing_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main([])
    assert "--dry-run" in capsys.readouterr().err
