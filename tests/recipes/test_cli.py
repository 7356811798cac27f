import subprocess
import sys

import pytest

from moe_zero import cli


def test_help_teaches(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("train", "eval", "query", "doctor", "examples:", "torchrun"):
        assert word in text
    assert cli.main([]) == 2


def test_every_field_is_an_option(capsys):
    from dataclasses import fields

    from moe_zero.recipes.config import TrainConfig

    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for field in fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize("library", cli.LIBRARIES)
def test_missing_library_is_one_line(library, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)  # what the import system takes for "not there"
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == f"moe-zero train needs {library}: pip install 'moe-zero[train]'\n"


def test_doctor_needs_none_of_the_libraries():
    """In a process of its own, where importing any of them fails."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'yaml', 'numpy', 'PIL', 'matplotlib', 'skimage', 'tokenizers', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from moe_zero.cli import main\n"
        "sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["train", "--lr", "-1"], 1, "error: lr is -1.0; it must be greater than 0"),
        (["train", "--lr", "fast"], 2, "--lr"),
        (["train", "--no-such-option", "1"], 2, "--no-such-option"),
        (["train", "--data", "nothing.jsonl"], 1, "error: data is 'nothing.jsonl', but there is no such file"),
        (["train", "--config", "nothing.yaml"], 1, "nothing.yaml"),
        (["eval", "--run", "nothing"], 1, "error: nothing holds no run"),
        (["query", "--run", "nothing"], 1, "error: query takes either --text or --image"),
        (["query", "--run", "nothing", "--text", " "], 1, "error: text is ' '"),
        (["fly"], 2, "fly"),
    ],
)
def test_wrong_usage_is_one_message_and_an_exit_code(arguments, code, named, capsys):
    assert cli.main(arguments) == code
    error = capsys.readouterr().err
    assert named in error and "Traceback" not in error
