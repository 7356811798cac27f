"""The main job: train a Q-Former on photographs and captions, sharded over processes, and evaluate retrieval.

`train` is called once, by the command line or by you; `run` is what each process does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_zero.qformer import QFormerLayer
from moe_zero.qformer.checkpoint import MODEL_TYPE
from moe_zero.qformer.weight_files import write_weights
from moe_zero.recipes import routing
from moe_zero.recipes.captions import CaptionEvaluation, PictureCaptions, caption_crops, check_available
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.plots import draw_captions, draw_experts, draw_losses, draw_routing, draw_similarity
from moe_zero.recipes.prepare import Prepared, build_model, load_data_once, prepare
from moe_zero.recipes.processes import Processes, StopSignal, joined, launch, peak_memory_mib, return_freed_memory
from moe_zero.recipes.progress import Reporter
from moe_zero.recipes.retrieval import Retrieval, retrieve
from moe_zero.zero import PendingSave, find_checkpoint, load_checkpoint, save_checkpoint_async, shard

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
MODEL, CHECKPOINTS = "model.safetensors", "checkpoints"
STEPS_PER_TRIM = 5


def train(config: TrainConfig) -> dict:
    """Train as ``config`` says, in as many processes, and return what ``summary.json`` holds.

    Raises:
        FileExistsError: the folder already holds a run, and neither ``resume`` nor ``overwrite`` is set.
        DataError, FileNotFoundError, ImportError, ValueError: something in the data or the options is wrong.
        KeyboardInterrupt: the run was interrupted, after it wrote a checkpoint.
        WorkerError: a process failed.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        config = config.with_(resume=True, overwrite=False)  # torchrun --max-restarts: go on where the last try was
    if "lm" in config.objectives:
        check_available()
    if int(os.environ.get("RANK", "0")) == 0:
        load_data_once(config)  # so that errors in the data show before processes are started
        if not _open_folder(Path(config.out), config) and config.resume:
            Reporter(speaks=True).say(f"{config.out} holds no run to resume: starting a new one")
    return launch(run, config.nproc, config)


def _open_folder(folder: Path, config: TrainConfig) -> bool:
    """Make the folder ready, and say whether there is a run in it to go on with."""
    started = folder / CONFIG
    if config.resume and started.exists():
        config.check_resumes(TrainConfig.load(started))
        return True
    if started.exists() and not config.overwrite:
        raise FileExistsError(
            f"{folder} already holds a run: continue it with --resume, replace it with --overwrite, or choose another "
            "--out"
        )
    if started.exists():
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for name in (METRICS, SUMMARY, MODEL):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    config.with_(resume=False, overwrite=False).save(started)
    return False


def run(config: TrainConfig) -> dict:
    """One process's part of `train`."""
    started = time.perf_counter()
    with joined(config.device, config.threads) as processes:
        if config.batch_size % processes.world_size:
            raise ValueError(
                f"batch_size is {config.batch_size}; it must be a multiple of {processes.world_size}, the number of "
                "processes, which take equal parts of it"
            )
        reporter = Reporter(processes.is_first, config.log_every)
        folder = Path(config.out)
        if processes.any(processes.is_first and config.resume and (folder / SUMMARY).exists()):
            summary = json.loads((folder / SUMMARY).read_text())
            reporter.say(f"the run in {folder} is finished")
            reporter.retrieval(summary["retrieval"])
            reporter.routing(summary.get("routing", []))
            if "captions" in summary:
                reporter.captions(summary["captions"])
            return summary
        prepared = prepare(config, processes, counting=reporter.counting)
        data = prepared.data
        held_out = sum(picture.held_out_captions for picture in data.eval)
        reporter.say(
            f"{len(data.train)} pictures to train on, {len(data.eval)} to evaluate with "
            f"({held_out} of them with captions not trained on), {len(data.skipped)} bad rows left out"
        )
        for row in data.skipped[:5]:
            reporter.say(f"  left out: {row}")
        job = Job(config, processes, prepared)
        reporter.say(
            f"{job.parameters / 1e6:.1f} M parameters on {processes.world_size} process"
            f"{'es' * (processes.world_size > 1)} ({processes.device.type}), {config.precision}, seed {config.seed}"
        )
        first = job.resume()
        if first:
            reporter.say(f"resumed at step {first}")
        if not job.fit(first, reporter):
            raise KeyboardInterrupt(f"stopped; resume with --out {config.out} --resume")

        return _conclude(job, prepared, reporter, started)


def _conclude(job: Job, prepared: Prepared, reporter: Reporter, started: float) -> dict:
    """Evaluate what was trained and write everything but metrics and checkpoints into the run's folder."""
    config, processes, folder, data = job.config, job.processes, job.folder, prepared.data
    evaluate_started = time.perf_counter()
    found = evaluate(job.sharded, prepared, processes, config)
    evaluate_seconds = time.perf_counter() - evaluate_started
    reporter.retrieval(found.figures())
    qformer = config.qformer(prepared.encoder_width)
    loads = []
    if found.routes_IL is not None:
        loads = routing.loads_of_routes(found.routes_IL, qformer.routed_layers, qformer.num_experts - 1)
    reporter.routing(routing.figures(loads))
    written = None
    if "lm" in config.objectives:
        caption_started = time.perf_counter()
        written = evaluate_captions(job.sharded, prepared, processes, config)
        caption_seconds = time.perf_counter() - caption_started
        reporter.captions(written.figures())
    weights = job.sharded.state_dict_full(rank0_only=True)
    peak = torch.tensor([peak_memory_mib(processes.device)], dtype=torch.float64, device=processes.device)
    summary = {
        "retrieval": found.figures(),
        **({"captions": written.figures()} if written is not None else {}),
        "routing": routing.figures(loads),
        "data": {
            "train_pictures": len(data.train),
            "eval_pictures": len(data.eval),
            "pictures_with_held_out_captions": sum(picture.held_out_captions for picture in data.eval),
            "skipped_rows": len(data.skipped),
        },
        "model": {"parameters": job.parameters, "preset": config.preset},
        "peak_memory_mib": processes.concatenated(peak).tolist(),
        "processes": processes.world_size,
        "threads": torch.get_num_threads(),
        "device": processes.device.type,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if processes.is_first:
        # With the configuration that moe-zero convert needs.
        recorded = {"model_type": MODEL_TYPE, **job.qformer.to_dict()}
        write_weights({name: value.contiguous() for name, value in weights.items()}, folder / MODEL, recorded, {})
        steps = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        step_seconds = [row["seconds"] for row in steps]  # of all steps, also those before the run was resumed
        pictures = draw_all(folder, found, prepared, written)
        summary["final"] = steps[-1]
        summary["seconds"] = {
            "features": prepared.seconds,
            "train": sum(step_seconds),
            "step_median": statistics.median(step_seconds),
            "evaluate": evaluate_seconds,
            **({"captions": caption_seconds} if written is not None else {}),
            "total": time.perf_counter() - started,
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        reporter.files(folder, [SUMMARY, METRICS, MODEL, *pictures])
    processes.barrier()
    return summary


class Job:
    """The sharded model with its optimizer, its place in the data, and its folder."""

    def __init__(self, config: TrainConfig, processes: Processes, prepared: Prepared):
        self.config, self.processes = config, processes
        self.folder = Path(config.out)
        self.source = prepared.batches()
        model = build_model(config, prepared.encoder_width).to(processes.device)
        self.qformer = model.qformer.config
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.sharded = shard(model, QFormerLayer, group_fn=_decay_group)
        self.optimizer = torch.optim.AdamW(
            self.sharded.param_groups([{"weight_decay": config.weight_decay}, {"weight_decay": 0.0}]), lr=config.lr
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor(config))
        self.saving: PendingSave | None = None
        torch.manual_seed(config.seed + 1 + processes.rank)  # dropout differs between ranks

    def resume(self) -> int:
        """Load the newest checkpoint, if ``resume`` is set and there is one, and return the steps already done."""
        if not self.config.resume:
            return 0
        try:
            checkpoint = find_checkpoint(self.folder / CHECKPOINTS)
        except FileNotFoundError:  # stopped before its first checkpoint
            return 0
        extra = load_checkpoint(checkpoint, self.sharded, self.optimizer, self.scheduler)
        if self.processes.is_first:
            _cut_metrics(self.folder / METRICS, extra["step"])
        self.processes.barrier()
        return extra["step"]

    def save(self, step: int) -> None:
        """Start writing a checkpoint; `wait_for_save` and the next one wait for it."""
        extra = {"step": step}
        self.saving = save_checkpoint_async(
            self.folder / CHECKPOINTS, self.sharded, self.optimizer, self.scheduler, extra
        )

    def wait_for_save(self) -> None:
        if self.saving is not None:
            self.saving.wait()

    def fit(self, first: int, reporter: Reporter) -> bool:
        """Train from step ``first`` on; False if a signal ended it. Either way the last step has its checkpoint."""
        config, saved = self.config, first
        with contextlib.ExitStack() as stack:
            stack.callback(self.wait_for_save)
            stop = stack.enter_context(StopSignal())
            report = stack.enter_context(reporter.steps(first, config.steps))
            metrics = None
            if self.processes.is_first:
                metrics = stack.enter_context(open(self.folder / METRICS, "a", encoding="utf-8"))
            for step in range(first, config.steps):
                row, stopping = self.step(step, stop)
                if metrics is not None:
                    metrics.write(json.dumps(row) + "\n")
                    metrics.flush()
                report(row, config.steps)
                done = step + 1
                due = config.checkpoint_every and done % config.checkpoint_every == 0
                if due or stopping or done == config.steps:
                    self.save(done)
                    saved = done
                if stopping:
                    break
        return saved == config.steps

    def step(self, step: int, stop: StopSignal) -> tuple[dict[str, Any], bool]:
        """One optimizer step. Returns its figures, means over the processes, and whether any process is to stop."""
        start = time.perf_counter()
        config, processes = self.config, self.processes
        batch = self.source.batch(step, processes.rank, processes.world_size)
        batch = type(batch)(*(tensor.to(processes.device, non_blocking=True) for tensor in batch))
        with autocast(config, processes):
            losses = self.sharded(
                batch.image_features,
                batch.input_ids,
                batch.attention_mask,
                image_ids=batch.image_ids,
                negative_draws=batch.negative_draws,
            )
        losses.total.backward()
        grad_norm = self.sharded.clip_grad_norm_(config.clip_norm or math.inf)
        lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        if step % STEPS_PER_TRIM == 0:
            return_freed_memory(processes.device)
        flag = losses.total.new_tensor(float(stop.received))
        values = {"loss": losses.total.detach(), **losses._asdict(), "stop": flag}
        del values["total"]
        load_LR = values.pop("expert_load_LR")
        loads = [] if load_LR is None else load_LR.flatten()
        *figures, stopping = processes.mean(torch.stack([*loads, *values.values()])).tolist()
        row = dict(zip(values, figures[len(loads) :], strict=False))
        for objective in {"itm", "lm"} - set(config.objectives):
            del row[objective], row[f"{objective}_accuracy"]
        if load_LR is not None:
            experts = load_LR.shape[1]
            row["expert_load"] = [figures[first : first + experts] for first in range(0, len(loads), experts)]
            of_layers = [routing.LayerLoad.of(layer, load) for layer, load in enumerate(row["expert_load"])]
            row["load_entropy"] = [layer.entropy for layer in of_layers]
            row["dead_experts"] = sum(len(layer.dead) for layer in of_layers)
        seconds = time.perf_counter() - start
        return {
            "step": step + 1,
            **row,
            "lr": lr,
            "grad_norm": float(grad_norm),
            "seconds": seconds,
            "samples_per_second": config.batch_size / seconds,
            "memory_mib": peak_memory_mib(processes.device),
        }, stopping > 0


def learning_rate_factor(config: TrainConfig) -> Callable[[int], float]:
    """Step to learning rate over ``config.lr``: a straight rise, then half a cosine down to ``min_lr``."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        low = config.min_lr / config.lr
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


def autocast(config: TrainConfig, processes: Processes):
    """The context that the model runs in: products in bf16 where ``precision`` says so."""
    return torch.autocast(processes.device.type, torch.bfloat16, enabled=config.precision == "bf16")


def evaluate(model: nn.Module, prepared: Prepared, processes: Processes, config: TrainConfig) -> Retrieval:
    """Retrieval among the evaluation crops and captions; every process takes part."""
    image, image_owner = prepared.eval_images()
    captions, text_owner = prepared.eval_texts()
    was_training = model.training
    model.eval()
    found = retrieve(
        model,
        image,
        image_owner,
        captions,
        text_owner,
        processes,
        autocast=lambda: autocast(config, processes),
        rerank=config.rerank,
    )
    model.train(was_training)
    return found


def evaluate_captions(
    model: nn.Module, prepared: Prepared, processes: Processes, config: TrainConfig
) -> CaptionEvaluation:
    """A caption of every evaluation crop; every process takes part."""
    image, owner_I = prepared.eval_images()
    was_training = model.training
    model.eval()
    with autocast(config, processes):
        captions = caption_crops(model, image, len(owner_I), prepared.tokenizer, processes)
    model.train(was_training)
    by_picture: list[list[str]] = [[] for _ in prepared.data.eval]
    for caption, owner in zip(captions, owner_I.tolist(), strict=True):
        by_picture[owner].append(caption)
    return CaptionEvaluation(
        tuple(
            PictureCaptions(picture.name, tuple(own), picture.objects)
            for picture, own in zip(prepared.data.eval, by_picture, strict=True)
        )
    )


def draw_all(folder: Path, found: Retrieval, prepared: Prepared, written: CaptionEvaluation | None = None) -> list[str]:
    """The PNG files of a run; returns their names."""
    from moe_zero.recipes.data import read_image
    from moe_zero.recipes.plots import SHOWN

    names = [picture.name for picture in prepared.data.eval]
    drawn = ["losses.png", "similarity.png"]
    draw_losses(folder / METRICS, folder / drawn[0])
    draw_similarity(found, names, folder / drawn[1])
    thumbnails = []
    for picture in prepared.data.eval[:SHOWN]:
        image = read_image(picture.path)
        image.thumbnail((160, 160))
        thumbnails.append(image)
    if written is not None:
        drawn.append("captions.png")
        draw_captions(written, thumbnails, folder / drawn[-1])
    if found.routes_IL is not None:
        qformer = prepared.config.qformer(prepared.encoder_width)
        drawn.append("routing.png")
        draw_routing(folder / METRICS, qformer.routed_layers, folder / drawn[-1])
        drawn.append("experts.png")
        draw_experts(
            found.routes_IL,
            found.image_owner_I,
            thumbnails,
            names,
            qformer.routed_layers,
            qformer.num_experts - 1,
            folder / drawn[-1],
        )
    return drawn


def _decay_group(name: str, parameter: nn.Parameter) -> int:
    """0: decays; 1: biases, norms and the temperature, which don't."""
    return int(parameter.ndim < 2)


def _cut_metrics(file: Path, steps: int) -> None:
    """Drop the lines of steps after the checkpoint, which will be done again, and one that was cut off by a kill."""
    kept = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            if json.loads(line)["step"] <= steps:
                kept.append(line + "\n")
        except ValueError:
            break
    file.write_text("".join(kept))
