"""All commands but ``bench`` and ``doctor``. The options of ``train`` are the fields of `TrainConfig`."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_zero.qformer.layouts import LAYOUT_NAMES
from moe_zero.recipes.config import TrainConfig
from moe_zero.recipes.plan_command import plan
from moe_zero.recipes.processes import INTERRUPTED, WorkerError, joined
from moe_zero.recipes.progress import Reporter

app = typer.Typer(name="moe-zero", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
TYPES = {"int": int, "float": float, "str": str, "bool": bool}
EXPECTED = (ValueError, OSError, ImportError, WorkerError)
"""What a user can mend: shown as one message, without a traceback (MOE_ZERO_TRACEBACK=1 shows it)."""


def main(arguments: list[str]) -> int:
    """Run a command of `app`; see `moe_zero.cli.main` for the exit code."""
    try:
        app(arguments, prog_name="moe-zero")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _with_plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with what a user can mend shown as one message and turned into an exit code."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        try:
            command(**options)
        except KeyboardInterrupt as error:
            print(f"interrupted{f': {error}' if str(error) else ''}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except EXPECTED as error:
            if os.environ.get("MOE_ZERO_TRACEBACK"):
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return wrapped


def _parameter(item: Field) -> inspect.Parameter:
    """The option of a field. None means 'not given', so that a file's value is replaced only by what is typed."""
    kind = str(item.type).partition(" | ")[0]
    default = ",".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
    shown = "" if default in (None, False) else f" [default: {default}]"
    flag = "--" + item.name.replace("_", "-")
    annotation = Annotated[
        TYPES.get(kind, str) | None,
        typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind == "bool" else flag,
            help=item.metadata["help"] + shown,
            rich_help_panel=item.metadata["panel"],
            show_default=False,
        ),
    ]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _train(config: Path | None = None, **options: Any) -> None:
    """Train a Q-Former on pictures and captions, evaluate retrieval, draw plots.

    Every option may also stand in a YAML file (--config), by its name with underscores; options on the command line
    win. The run's folder gets them all as config.yaml, so --resume needs nothing but --out.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("resume") and config is None:
        saved = Path(given.get("out", TrainConfig.out)) / "config.yaml"
        config = saved if saved.exists() else None
    settings = TrainConfig.load(config, given)
    from moe_zero.recipes.train import train  # not before wrong settings were refused

    train(settings)


_CONFIG_FILE = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", rich_help_panel="Run")]
_train.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG_FILE),
        *map(_parameter, fields(TrainConfig)),
    ]
)
_train.__annotations__ = {name: item.annotation for name, item in _train.__signature__.parameters.items()}
app.command("train")(_with_plain_errors(_train))
app.command("plan")(_with_plain_errors(plan))

RUN = Annotated[Path, typer.Option("--run", help="Folder of a finished run.")]


@app.command("eval")
@_with_plain_errors
def evaluate(
    run: RUN = Path(TrainConfig.out),
    data: Annotated[str | None, typer.Option(help="Other data than the run's: a .jsonl or .csv table.")] = None,
    rerank: Annotated[int | None, typer.Option(help="Order the best N again by the matching head.")] = None,
    captions: Annotated[bool | None, typer.Option(help="Write captions too; by default if it was trained to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Evaluate retrieval and captions with a finished run: on its own evaluation crops, or on other data."""
    from moe_zero.recipes.trained import TrainedRun

    changes = {name: value for name, value in (("data", data), ("rerank", rerank)) if value is not None}
    with joined() as processes:
        trained = TrainedRun.open(run, processes, **changes)
        wanted = trained.writes_captions if captions is None else captions
        written = trained.caption().figures() if wanted else None
        figures = trained.retrieve().figures()
    if as_json:
        print(json.dumps(figures | ({"captions": written} if wanted else {}), indent=2))
        return
    reporter = Reporter(processes.is_first)
    reporter.retrieval(figures)
    if wanted:
        reporter.captions(written)


@app.command("query")
@_with_plain_errors
def query(
    text: Annotated[str | None, typer.Option(help="Rank the run's pictures for this sentence.")] = None,
    image: Annotated[Path | None, typer.Option(help="Rank the run's captions for this picture.")] = None,
    run: RUN = Path(TrainConfig.out),
    top: Annotated[int, typer.Option(help="How many to show.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ranking as JSON.")] = False,
) -> None:
    """Search with a finished run: pictures for a sentence, or captions for a picture."""
    if (text is None) == (image is None):
        raise ValueError("query takes either --text or --image")
    if text is not None and not text.strip():
        raise ValueError(f"text is {text!r}; it must be a sentence")
    from moe_zero.recipes.trained import TrainedRun

    with joined() as processes:
        trained = TrainedRun.open(run, processes)
        ranking = trained.rank_pictures(text) if text is not None else trained.rank_captions(image)
    if as_json:
        print(json.dumps([{"match": name, "similarity": score} for name, score in ranking[:top]], indent=2))
    else:
        Reporter(processes.is_first).ranking(f"Best for {text or image}", ranking[:top])


@app.command("caption")
@_with_plain_errors
def caption(
    pictures: Annotated[
        list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Pictures; - reads paths from standard input.")
    ] = None,
    image: Annotated[list[str] | None, typer.Option(help="The same as an argument; repeatable.")] = None,
    run: RUN = Path(TrainConfig.out),
    num_captions: Annotated[int, typer.Option(help="Captions of each picture.")] = 1,
    beams: Annotated[
        int | None, typer.Option(help="Follow so many texts and keep the best. [default: as many as captions]")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw words by their probability instead.")] = False,
    temperature: Annotated[float, typer.Option(help="With --sample: below 1 likely words become likelier.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --sample: draw among the likeliest words of this share.")] = 0.9,
    max_words: Annotated[int, typer.Option(help="Word pieces of a caption at most.")] = 30,
    seed: Annotated[int, typer.Option(help="With --sample: the same seed draws the same captions.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a picture.")] = False,
) -> None:
    """Write captions of pictures with a finished run.

    Prints a line for each caption: the picture, a tab, the caption. The best word is taken each time, unless --beams or
    --sample say otherwise. The middle of a picture is what is looked at.

    moe-zero caption --run runs/demo photo.jpg

    moe-zero caption --run runs/demo --beams 5 --num-captions 3 photo.jpg other.png

    find . -name '*.jpg' | moe-zero caption --run runs/demo --json - > captions.jsonl
    """
    named = [*(pictures or []), *(image or [])]
    if "-" in named:
        named = [path for path in named if path != "-"] + [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not named:
        raise ValueError("caption takes pictures: moe-zero caption --run runs/demo photo.jpg")
    missing = [path for path in named if not Path(path).exists()]
    if missing:
        raise FileNotFoundError(f"image is {missing[0]!r}, but there is no such file")
    from moe_zero.recipes.captions import check_available

    check_available()
    import torch

    from moe_zero.qformer.captioning import CaptionOptions
    from moe_zero.recipes.trained import CaptionWriter

    options = CaptionOptions(
        num_captions=num_captions,
        beams=(1 if sample else num_captions) if beams is None else beams,
        sample=sample,
        temperature=temperature,
        top_p=top_p,
        max_words=max_words,
    )
    with joined() as processes:
        torch.manual_seed(seed)
        written = CaptionWriter.open(run, processes).write(named, options)
        if not processes.is_first:
            return
    for path, captions in zip(named, written, strict=True):
        if as_json:
            print(json.dumps({"image": path, "captions": captions}, ensure_ascii=False))
        else:
            for text in captions:
                print(f"{path}\t{text}")


@app.command("routes")
@_with_plain_errors
def routes(
    pictures: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures.")],
    run: RUN = Path(TrainConfig.out),
    out: Annotated[Path, typer.Option(help="The drawing, a .png, .svg or .pdf file.")] = Path("routes.png"),
) -> None:
    """Draw the beams of experts that pictures went through in a finished run: what docs/routing.md explains.

    moe-zero routes --run runs/demo photo.jpg other.jpg --out routes.png
    """
    from moe_zero.recipes.plots import draw_beams
    from moe_zero.recipes.trained import trace_pictures

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"out is {str(out)!r}; it must end in .png, .svg or .pdf")
    with joined() as processes:
        traced, num_routed = trace_pictures(run, pictures, processes)
        draw_beams(traced, num_routed, out)
    print(out)


@app.command("convert")
@_with_plain_errors
def convert_checkpoint(
    source: Annotated[Path, typer.Argument(help="A weight file, the index of a sharded one, or a folder.")],
    target: Annotated[Path, typer.Argument(help="A .safetensors or .pth file, or a folder (with config.json).")],
    to: Annotated[str, typer.Option(help=f"Names to write: {', '.join(LAYOUT_NAMES)}.")] = "moe-zero",
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Initialise what the source lacks, leave what is unknown; name both."),
    ] = False,
    query_ffn_from_text: Annotated[
        bool, typer.Option("--query-ffn-from-text", help="Start the query feed-forward from the text's (BERT).")
    ] = False,
    experts: Annotated[
        int, typer.Option(help="Make a mixture of so many experts, the universal one included.", min=1)
    ] = 1,
    beams: Annotated[int, typer.Option(help="Beams of the mixture, the universal one included.")] = 3,
    moe_layers: Annotated[
        str | None, typer.Option(help="Layers of the mixture, such as 6,7,8; by default the upper half.")
    ] = None,
    equal: Annotated[
        bool, typer.Option("--equal", help="Let the mixture start as the same function as the dense model.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting that the source does not record, such as num_beams=3; repeatable."),
    ] = None,
) -> None:
    """Convert a Q-Former's checkpoint (transformers, LAVIS, the published mixture, BERT), dense ones to mixtures."""
    from moe_zero.qformer.checkpoint import convert, parse_settings

    if moe_layers is not None and not re.fullmatch(r"\d+(,\d+)*", moe_layers):
        raise ValueError(f"--moe-layers is {moe_layers!r}; it must be layer numbers such as 6,7,8")
    report = convert(
        source,
        target,
        to=to,
        allow_missing=allow_missing,
        query_ffn_from_text=query_ffn_from_text,
        experts=experts,
        beams=beams,
        moe_layers=None if moe_layers is None else [int(layer) for layer in moe_layers.split(",")],
        equal=equal,
        settings=parse_settings(settings or []),
    )
    print(report)
