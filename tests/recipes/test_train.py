"""The main job from end to end, on a small model and made pictures; the default job's quality is the last test."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moe_zero import cli
from moe_zero.recipes.batches import BatchSource
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.processes import WorkerError
from moe_zero.recipes.train import train
from moe_zero.zero import find_checkpoint

STEPS = 7
WORDS = ("red", "green", "blue", "yellow", "purple")
LOSSES = ("loss", "itc", "itm", "lm", "gate", "itc_accuracy", "itm_accuracy", "lm_accuracy", "temperature", "lr")


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(folder, expected: list[dict], tolerance: float = 1e-4):
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name in LOSSES:
            assert row[name] == pytest.approx(other[name], rel=tolerance, abs=2e-5), f"step {row['step']}: {name}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache, table, tiny_settings):
    """A run of `STEPS` steps in one process, never interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(TrainConfig(**{**tiny_settings, "out": str(folder), "steps": STEPS}))
    return folder


def interrupt_at(monkeypatch, step: int, number: int = signal.SIGINT):
    """Send this process a signal while it prepares the batch of that step."""
    batch = BatchSource.batch

    def interrupted(self, now, *arguments):
        if now == step:
            os.kill(os.getpid(), number)
        return batch(self, now, *arguments)

    monkeypatch.setattr(BatchSource, "batch", interrupted)


def test_a_run_leaves_everything_in_its_folder(finished, tiny_settings):
    rows = metrics(finished)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["samples_per_second"] > 0 and row["memory_mib"] > 50 for row in rows)
    assert rows[0]["lr"] == rows[1]["lr"] == tiny_settings["lr"] and rows[-1]["lr"] < 0.2 * tiny_settings["lr"]
    summary = json.loads((finished / "summary.json").read_text())
    for direction in ("image_to_text", "text_to_image"):
        found = summary["retrieval"][direction]
        assert 0 <= found["r1"] <= found["r5"] <= 1 and found["chance_r1"] == pytest.approx(0.2)
        assert (found["queries"], found["candidates"]) == (5, 5)
    assert len(summary["peak_memory_mib"]) == summary["processes"] == 1
    assert summary["seconds"]["train"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert summary["data"]["pictures_with_held_out_captions"] == 5
    assert [own["picture"] for own in summary["captions"]["pictures"]] == [f"{word}.png" for word in WORDS]
    assert "object_accuracy" not in summary["captions"]  # the table has no column objects
    assert [layer["layer"] for layer in summary["routing"]] == [1]
    for row in rows:
        for load, entropy in zip(row["expert_load"], row["load_entropy"], strict=True):
            assert sum(load) == pytest.approx(1) and 0 <= entropy <= 1
        assert row["dead_experts"] == sum(share == 0 for load in row["expert_load"] for share in load)
    for name in ("losses.png", "similarity.png", "captions.png", "routing.png", "experts.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    assert TrainConfig.load(finished / "config.yaml").steps == STEPS


@pytest.mark.distributed
def test_two_processes_train_the_same(finished, tiny):
    config = tiny(nproc=2, steps=STEPS)
    summary = train(config)
    assert_same_training(config.out, metrics(finished))
    assert len(summary["peak_memory_mib"]) == summary["processes"] == 2
    alone = json.loads((finished / "summary.json").read_text())
    for part in ("retrieval", "captions", "routing"):
        assert summary[part] == alone[part]


@pytest.mark.distributed
def test_torchrun_needs_no_other_command(finished, tiny):
    config = tiny(steps=STEPS)
    config.save(Path(config.out).with_suffix(".yaml"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "moe_zero.cli", "train", "--config", str(Path(config.out).with_suffix(".yaml"))]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS}/{STEPS}" in done.stdout
    assert done.stdout.count("image to text") == 1  # only the first process speaks
    assert_same_training(config.out, metrics(finished))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_with_the_same_losses(number, finished, tiny, monkeypatch):
    config = tiny(steps=STEPS, checkpoint_every=0)
    interrupt_at(monkeypatch, 4, number)
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        train(config)
    assert len(metrics(config.out)) == 5
    monkeypatch.undo()
    train(config.with_(resume=True))
    assert_same_training(config.out, metrics(finished), tolerance=1e-6)


@pytest.mark.distributed
def test_resumes_on_another_number_of_processes(finished, tiny, monkeypatch):
    config = tiny(steps=STEPS)
    interrupt_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    train(config.with_(resume=True, nproc=2))
    assert_same_training(config.out, metrics(finished))


@pytest.mark.distributed
def test_ctrl_c_ends_all_processes_with_a_checkpoint(tiny):
    config = tiny(steps=10_000, checkpoint_every=0, nproc=2)
    run = _start(config)
    try:
        _wait_for_steps(run, config, 2)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=120) == 130
    finally:
        run.kill()
    done = len(metrics(config.out))
    assert done >= 2 and find_checkpoint(Path(config.out) / "checkpoints").is_dir()


def test_killed_run_resumes_from_its_last_checkpoint(finished, tiny):
    config = tiny(steps=STEPS, checkpoint_every=1)
    run = _start(config)
    try:
        _wait_for_steps(run, config, 3)
    finally:
        run.kill()
        run.wait()
    assert not (Path(config.out) / "summary.json").exists()
    train(config.with_(resume=True))
    assert_same_training(config.out, metrics(finished), tolerance=1e-6)
    assert len(list((Path(config.out) / "checkpoints").glob("checkpoint-*"))) <= 2


def _start(config: TrainConfig) -> subprocess.Popen:
    file = Path(config.out).with_suffix(".yaml")
    config.save(file)
    return subprocess.Popen([sys.executable, "-m", "moe_zero.cli", "train", "--config", str(file)])


def _wait_for_steps(run: subprocess.Popen, config: TrainConfig, steps: int) -> None:
    file = Path(config.out) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_text().count("\n") < steps:
        assert run.poll() is None, f"the run ended with {run.returncode} before step {steps}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_folder_with_a_run_is_not_overwritten_by_accident(finished):
    config = TrainConfig.load(finished / "config.yaml", {"out": str(finished)})
    with pytest.raises(FileExistsError, match="--resume"):
        train(config)
    with pytest.raises(ValueError, match=r"lr is 0\.5, but the run in"):
        train(config.with_(lr=0.5, resume=True))


def test_resuming_a_finished_run_only_shows_it(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert cli.main(["train", "--out", str(finished), "--resume"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_bad_rows_stop_a_run_or_are_counted(tiny, table, tmp_path, capsys):
    bad = table.with_name("bad.jsonl")
    bad.write_text(table.read_text() + json.dumps({"image": "nowhere.png", "caption": "x"}) + "\n")
    config = tiny(data=str(bad), steps=1)
    config.save(tmp_path / "bad.yaml")
    assert cli.main(["train", "--config", str(tmp_path / "bad.yaml")]) == 1
    assert f"{bad}:16: image 'nowhere.png' does not exist" in capsys.readouterr().err
    assert not Path(config.out).exists()
    assert cli.main(["train", "--config", str(tmp_path / "bad.yaml"), "--skip-bad"]) == 0
    text = capsys.readouterr().out
    assert "1 bad rows left out" in text and "nowhere.png" in text


def test_evaluation_of_a_finished_run_repeats_its_figures(finished, capsys):
    assert cli.main(["eval", "--run", str(finished), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    summary = json.loads((finished / "summary.json").read_text())
    assert again == summary["retrieval"] | {"captions": summary["captions"]}
    assert cli.main(["eval", "--run", str(finished), "--rerank", "3"]) == 0
    text = capsys.readouterr().out
    assert "image to text" in text and "Captions of unseen crops" in text
    assert cli.main(["eval", "--run", str(finished), "--no-captions"]) == 0
    assert "Captions of unseen crops" not in capsys.readouterr().out


def test_captions_of_a_run_that_was_not_trained_to_write_them_are_refused(tiny, capsys):
    config = tiny(objectives=("itc",), steps=1)
    train(config)
    assert cli.main(["eval", "--run", config.out, "--captions"]) == 1
    assert "the run was trained for itc; captions need lm among --objectives" in capsys.readouterr().err


def test_query_ranks_pictures_and_captions(finished, table, capsys):
    assert cli.main(["query", "--run", str(finished), "--text", "a red wall", "--json", "--top", "9"]) == 0
    ranking = json.loads(capsys.readouterr().out)
    assert {entry["match"] for entry in ranking} == {f"{word}.png" for word in WORDS}
    assert [entry["similarity"] for entry in ranking] == sorted(
        (entry["similarity"] for entry in ranking), reverse=True
    )
    assert cli.main(["query", "--run", str(finished), "--image", str(table.with_name("red.png"))]) == 0
    assert "Best for" in capsys.readouterr().out
    assert cli.main(["query", "--run", str(finished), "--image", str(table)]) == 1
    assert "no image that Pillow reads" in capsys.readouterr().err


def test_captions_of_pictures_from_anywhere(finished, table, capsys, monkeypatch):
    red, blue = (str(table.with_name(f"{word}.png")) for word in ("red", "blue"))
    command = ["caption", "--run", str(finished), "--max-words", "5"]
    assert cli.main([*command, red, "--image", blue]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [red, blue]
    monkeypatch.setattr("sys.stdin", [f"{blue}\n", "\n"])
    assert cli.main([*command, "--json", "--sample", "--num-captions", "3", "-"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["image"] == blue and len(found["captions"]) == 3
    assert cli.main([*command, "nothing.png"]) == 1
    assert "image is 'nothing.png', but there is no such file" in capsys.readouterr().err
    assert cli.main(command) == 1
    assert "caption takes pictures" in capsys.readouterr().err


def test_a_run_can_be_converted(finished, tmp_path, capsys):
    assert cli.main(["convert", str(finished / "model.safetensors"), str(tmp_path / "model")]) == 0
    text = capsys.readouterr().out
    assert "num_beams = 3, recorded in the file" in text and "matching head" in text
    assert cli.main(["convert", str(finished), str(tmp_path / "again.safetensors")]) == 0


def test_beams_of_pictures_are_drawn(finished, table, tmp_path, capsys):
    red, blue = (str(table.with_name(f"{word}.png")) for word in ("red", "blue"))
    assert cli.main(["routes", "--run", str(finished), red, blue, "--out", str(tmp_path / "routes.png")]) == 0
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["routes", "--run", str(finished), red, "--out", "routes.txt"]) == 1
    assert "out is 'routes.txt'; it must end in .png" in capsys.readouterr().err


def test_objects_of_a_table_judge_the_captions(tiny, table, tmp_path):
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    file = table.with_name("objects.jsonl")
    for row in rows[:6]:  # of two of five pictures
        row["objects"] = [row["image"].removesuffix(".png"), "wall"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = train(tiny(data=str(file), steps=2))
    found = summary["captions"]
    assert found["judged_pictures"] == 2
    assert all(0 <= found[name] <= 1 for name in ("object_accuracy", "caption_accuracy", "chance"))
    assert [own["accepted"] for own in found["pictures"]][:3] == [["red", "wall"], ["green", "wall"], []]


def test_resuming_nothing_is_said(tiny, capsys):
    train(tiny(steps=1, resume=True))
    assert "holds no run to resume: starting a new one" in capsys.readouterr().out


def test_unfinished_run_says_how_to_finish(tiny, monkeypatch, capsys):
    config = tiny()
    interrupt_at(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert cli.main(["query", "--run", config.out, "--text", "x"]) == 1
    assert f"moe-zero train --out {config.out} --resume" in capsys.readouterr().err


@pytest.mark.distributed
def test_failing_process_says_why(tiny):
    with pytest.raises(WorkerError, match=r"process \d failed: .*no folder with a config.json"):
        train(tiny(encoder="hf:/nowhere", nproc=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 1},
        {"objectives": ("itc",)},
        {"objectives": ("itc", "lm")},
        {"precision": "bf16"},
        {"dropout": 0.1},
        {"num_experts": 2, "num_beams": 2, "num_hidden_layers": 3, "moe_layers": (1, 2)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_variants_train(changes, tiny):
    summary = train(tiny(steps=2, **changes))
    assert torch.isfinite(torch.tensor(summary["final"]["loss"]))


@pytest.mark.timeout(600)
def test_real_photographs_are_found(cache, tmp_path):
    """The default data and weights, with fewer crops, queries and steps and the contrastive objective alone."""
    summary = train(
        TrainConfig(
            out=str(tmp_path / "run"),
            cache=str(cache),
            train_crops=3,
            eval_crops=2,
            num_query_tokens=8,
            objectives=("itc",),
            steps=12,
            warmup_steps=4,
            checkpoint_every=0,
            threads=1,
            device="cpu",
        )
    )
    for direction, found in summary["retrieval"].items():
        assert found["r1"] >= 0.8, f"{direction}: {found}"
        assert found["chance_r1"] < 0.06
