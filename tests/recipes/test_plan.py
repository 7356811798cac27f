"""``moe-zero plan``."""

import json

import pytest

from moe_zero.qformer import QFormerConfig, QFormerModel, save_qformer
from moe_zero.recipes.commands import main
from moe_zero.recipes.plan_command import read_config

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "encoder_width": 24,
    "vocab_size": 50,
    "moe_layers": [1],
}


def planned(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_kind_of_source_means_the_same_model(tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text("\n".join(f"{name}: {value}" for name, value in SMALL.items()))
    (tmp_path / "settings.json").write_text(json.dumps(SMALL))
    save_qformer(QFormerModel(QFormerConfig(**SMALL)), tmp_path / "folder")
    sources = [tmp_path / "settings.yaml", tmp_path / "settings.json", tmp_path / "folder"]
    sources.append(tmp_path / "folder" / "model.safetensors")
    plans = [planned(capsys, source, "--ranks", 3, "--dtype", "bf16") for source in sources]
    kept = [[(each["parameters"], each["all_gather"], each["activations"]) for each in plan] for plan in plans]
    assert all(other == kept[0] for other in kept)
    ddp, *_, third = plans[0]
    numel = sum(p.numel() for p in QFormerModel(QFormerConfig(**SMALL)).parameters())
    assert ddp["parameters"] == 2 * numel and third["parameters"] >= 4 * numel / 3
    assert [each["strategy"] for each in plans[0]] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def test_presets():
    assert read_config("seed") == QFormerConfig()
    assert read_config("small").hidden_size == 384


def test_table_fits_a_terminal_of_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "settings.json").write_text(json.dumps(SMALL))
    assert main(["plan", str(tmp_path / "settings.json")]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    for words in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "activations", "peak at", "backward", "gathered", "sent"):
        assert words in shown, words


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "'nowhere' is no preset (small, seed), and there is no such file"),
        (["seed", "--dtype", "int4"], "--dtype is 'int4'; it must be one of fp32, bf16, fp16"),
        (["seed", "--optimizer", "lion"], "--optimizer is 'lion'; it must be one of adamw"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments, message, capsys):
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_wrong_setting_is_named(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("hidden: 3\n")
    assert main(["plan", str(tmp_path / "bad.yaml")]) == 1
    assert "unknown Q-Former setting hidden" in capsys.readouterr().err
