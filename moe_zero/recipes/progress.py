"""What one sees of a run: a live line in a terminal, plain lines in a pipe, tables at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Reporter:
    """Everything that a run says. Only the first process speaks.

    Args:
        speaks: whether this process does.
        every: steps between lines where the output is no terminal.
    """

    def __init__(self, speaks: bool, every: int = 10):
        self.console = Console(quiet=not speaks, highlight=False, soft_wrap=True)
        self.every = every
        self.live = speaks and self.console.is_terminal

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, first: int, total: int) -> Iterator[StepReport]:
        """While training goes on; gives what takes each step's figures."""
        with Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        ) as progress:
            yield StepReport(self, progress, progress.add_task("train", total=total, completed=first, figures=""))

    def counting(self, text: str):
        """A function of (done, total) that says how far a longer piece of work is."""

        def count(done: int, total: int) -> None:
            if self.live:
                self.console.print(f"{text} {done}/{total}", end="\n" if done == total else "\r", markup=False)
            elif done == total:
                self.say(f"{text} {done}/{total}")

        return count

    def retrieval(self, figures: dict) -> None:
        """The table of `Retrieval.figures`."""
        table = Table(title="Retrieval on unseen crops and wordings", title_justify="left")
        for column in ("", "R@1", "chance", "R@5", "chance", "searches", "candidates"):
            table.add_column(column, justify="right" if column else "left")
        for direction, found in figures.items():
            shares = (f"{found[key]:.1%}" for key in ("r1", "chance_r1", "r5", "chance_r5"))
            table.add_row(direction.replace("_", " "), *shares, str(found["queries"]), str(found["candidates"]))
        self.console.print(table)

    def routing(self, layers: Sequence[dict]) -> None:
        """The table of `routing.figures`; nothing for a dense model."""
        if not layers:
            return
        table = Table(title="Experts that the unseen crops took", title_justify="left")
        for column in ("layer", "load of each routed expert", "entropy (1: even)", "dead experts"):
            table.add_column(column, justify="right")
        for layer in layers:
            load = "  ".join(f"{share:.0%}" for share in layer["load"])
            dead = ", ".join(map(str, layer["dead"])) or "none"
            table.add_row(str(layer["layer"]), load, f"{layer['entropy']:.2f}", dead)
        self.console.print(table)

    def captions(self, figures: dict) -> None:
        """The table of `CaptionEvaluation.figures`."""
        table = Table(title="Captions of unseen crops (that of most crops of each picture)", title_justify="left")
        judged = "object_accuracy" in figures
        for column in ("picture", "caption", *(("accepted words", "right") if judged else ())):
            table.add_column(column, overflow="fold")
        for own in figures["pictures"]:
            right = "" if own["named"] is None else f"{own['named']} of {len(own['captions'])}"
            table.add_row(own["picture"], own["usual"], *((", ".join(own["accepted"]), right) if judged else ()))
        self.console.print(table)
        if judged:
            self.say(
                f"the right object is named for {figures['object_accuracy']:.1%} of {figures['judged_pictures']} "
                f"pictures, in {figures['caption_accuracy']:.1%} of the captions "
                f"({figures['chance']:.1%} if the captions were dealt out at random)"
            )

    def ranking(self, title: str, rows: Sequence[tuple[str, float]]) -> None:
        """The best of a search, each with its similarity."""
        table = Table(title=title, title_justify="left")
        table.add_column("", justify="right")
        table.add_column("match")
        table.add_column("similarity", justify="right")
        for place, (name, score) in enumerate(rows, 1):
            table.add_row(str(place), name, f"{score:.3f}")
        self.console.print(table)

    def files(self, folder: Path, names: Sequence[str]) -> None:
        self.say(f"Written to {folder}: {', '.join(names)}")


class StepReport:
    """Takes the figures of each step, as they stand in ``metrics.jsonl``."""

    def __init__(self, reporter: Reporter, progress: Progress, task):
        self.reporter, self.progress, self.task = reporter, progress, task

    def __call__(self, row: dict, total: int) -> None:
        accuracy = f"acc {row['itc_accuracy']:.2f}"
        for objective in ("itm", "lm"):
            if f"{objective}_accuracy" in row:
                accuracy += f"/{row[f'{objective}_accuracy']:.2f}"
        figures = (
            f"loss {row['loss']:.3f}  {accuracy}  lr {row['lr']:.1e}  "
            f"{row['samples_per_second']:.1f} samples/s  {row['memory_mib'] / 1024:.2f} GiB"
        )
        self.progress.update(self.task, completed=row["step"], figures=figures)
        if not self.reporter.live and (row["step"] % self.reporter.every == 0 or row["step"] in (1, total)):
            self.reporter.say(f"step {row['step']}/{total}  {figures}")
