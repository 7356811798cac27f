"""``moe-zero bench``: run the benchmark suites on this machine and write one report, as Markdown and as a picture.

A case is what pytest-benchmark calls a group: rivals that did the same work in the same run. Its ratio is the median
of the fastest rival over ours: above 1 ours is faster. Rivals are all rows whose name does not begin with "ours".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

import moe_zero

FOLDER = Path(__file__).resolve().parent
ZERO3 = "zero3"
"""The one suite that is a program of its own: it launches the processes that it measures."""
SUITES = (*sorted(path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")), ZERO3)
ZERO3_COLUMNS = {
    "seconds": "step, s",
    "peak_mib": "peak MiB",
    "sent_mib": "sent MiB",
    "all_gather_mib": "gathered MiB",
    "reduce_scatter_mib": "reduced MiB",
}
OURS = "ours"
RATIO = "Ratio: median of the fastest rival over ours; above 1 ours is faster."


@dataclass(frozen=True)
class Row:
    """One contestant of one case: median and interquartile range in seconds."""

    case: str
    name: str
    median: float
    iqr: float
    rounds: int

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


@dataclass(frozen=True)
class Case:
    """Contestants that did the same work in the same run."""

    name: str
    rows: tuple[Row, ...]

    @property
    def rival(self) -> Row | None:
        """The fastest of the others."""
        return min((row for row in self.rows if not row.is_ours), key=lambda row: row.median, default=None)

    @property
    def ours(self) -> Row | None:
        """Of several variants the one that is named plainly, or else the first."""
        return min((row for row in self.rows if row.is_ours), key=lambda row: row.name, default=None)

    def ratio(self, row: Row) -> float | None:
        """How many times the fastest rival's median is of `row`'s; None without a rival."""
        return self.rival and self.rival.median / row.median


def rows_of(results: dict) -> list[Row]:
    """The rows of what ``pytest --benchmark-json`` wrote; benchmarks without rivals (of memory, say) are left out."""
    found = []
    for entry in results["benchmarks"]:
        if name := (entry["params"] or {}).get("rival"):
            stats = entry["stats"]
            found.append(Row(entry["group"], name, stats["median"], stats["iqr"], stats["rounds"]))
    return found


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """Rows by case, in order of first appearance; inside a case the fastest first."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.case, []).append(row)
    return [Case(name, tuple(sorted(group, key=lambda row: row.median))) for name, group in grouped.items()]


def machine(results: dict) -> str:
    """One line: processor or GPU, cores, system, versions."""
    cpu = results.get("machine_info", {}).get("cpu", {}).get("brand_raw") or platform.processor() or platform.machine()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cpu}, {torch.get_num_threads()} threads, {device}; {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, moe-zero {moe_zero.__version__}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    aligned = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(line)} |" for line in (header, aligned, *rows)] + [""]


def markdown(cases: Sequence[Case], results: dict, command: str) -> str:
    """The whole report: what ran on what, one line per case, then every row, memory, ZeRO-3."""
    day = results.get("datetime", str(date.today()))[:10]
    lines = ["# Speeds of moe-zero", "", f"{day}, made by `{command}`", "", machine(results), ""]
    if compared := [case for case in cases if case.ours and case.rival]:
        lines += ["![Ratios](report.png)", "", RATIO, ""]
        header = ("case", "ours", "fastest rival", "which", "ratio")
        lines += _table(header, (_summary(case) for case in compared))
    for case in cases:
        header = ("", "median", "iqr", "rounds", "ratio")
        lines += [f"## {case.name}", "", *_table(header, (_row(case, row) for row in case.rows))]
    if extras := [(e["name"], _figures(e["extra_info"])) for e in results["benchmarks"] if e["extra_info"]]:
        lines += ["## Also measured", "", *_table(("", "figures"), extras)]
    if ZERO3 in results:
        header = ("", *ZERO3_COLUMNS.values(), "last loss")
        rows = [(r["method"], *_measured(r), f"{r['losses'][-1]:.7f}") for r in results[ZERO3]]
        lines += ["## ZeRO-3: a training step of the full-size Q-Former, 2 processes", "", *_table(header, rows)]
    return "\n".join(lines)


def _summary(case: Case) -> tuple[str, ...]:
    ours, rival = case.ours, case.rival
    return case.name, _duration(ours.median), _duration(rival.median), rival.name, _ratio(case.ratio(ours))


def _row(case: Case, row: Row) -> tuple[str, ...]:
    return row.name, _duration(row.median), _duration(row.iqr), str(row.rounds), _ratio(case.ratio(row))


def _figures(extra_info: dict) -> str:
    return ", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in extra_info.items())


def _measured(result: dict) -> list[str]:
    return [f"{result[key]:.4g}" if key in result else "" for key in ZERO3_COLUMNS]


def draw(cases: Sequence[Case], file: Path) -> None:
    """A bar for each case's ratio on a logarithmic axis, with a line where both are equally fast."""
    from matplotlib.figure import Figure

    shown = [(case.name, case.ratio(case.ours), case.rival.name) for case in cases if case.ours and case.rival]
    figure = Figure(figsize=(11, 1.2 + 0.3 * len(shown)), layout="constrained")
    axis = figure.subplots()
    names, ratios, rivals = zip(*reversed(shown), strict=True)
    colours = ["#059669" if ratio >= 1 else "#ea580c" for ratio in ratios]
    axis.barh(names, [ratio - 1 for ratio in ratios], left=1, color=colours)
    for place, (ratio, rival) in enumerate(zip(ratios, rivals, strict=True)):
        axis.text(max(ratio, 1) * 1.02, place, f"{ratio:.2f} x  {rival}", va="center", fontsize=8)
    axis.axvline(1, color="#374151", linewidth=1)
    axis.set_xscale("log")
    low, high = min(*ratios, 0.9), max(*ratios, 1.1)
    axis.set_xlim(low / 1.05, high * (high / low) ** 0.35)
    for set_formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        set_formatter(lambda ratio, _: f"{ratio:g} x")
    axis.tick_params(which="both", labelsize=8)
    axis.set_xlabel("median of the fastest rival / ours (right of the line: ours is faster)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def _run(command: list[str], what: str) -> None:
    code = subprocess.run([sys.executable, *command]).returncode
    if code:
        raise SystemExit(f"moe-zero bench: {what} failed with exit status {code}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-zero bench",
        description="Measure every operator, the Q-Former and ZeRO-3 against their rivals on this machine, on the GPU "
        "where there is one, and write report.md, report.png and results.json. All suites take about half an hour "
        "on two cores: close other programs.",
        epilog="examples:\n  moe-zero bench\n  moe-zero bench gate flat --out /tmp/speeds\n"
        "  moe-zero bench --from-json bench_report/results.json   # draw the report again",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("bench_report"), help="folder to write (default bench_report)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="measure nothing: report on an earlier results.json"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := [suite for suite in options.suites if suite not in SUITES]:
        parser.error(f"there is no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    needed = {"pytest": "pytest", "pytest_benchmark": "pytest-benchmark", "matplotlib": "matplotlib"}
    if missing := [name for module, name in needed.items() if importlib.util.find_spec(module) is None]:
        print(f"moe-zero bench needs {', '.join(missing)}: pip install 'moe-zero[bench]'", file=sys.stderr)
        return 1
    if options.from_json:
        try:
            results = json.loads(options.from_json.read_text())
            results["benchmarks"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--from-json: {options.from_json} is not a results.json of this command ({error})")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.from_json:
        results = _measure(options.suites or SUITES, options.out)
    cases = cases_of(rows_of(results))
    (options.out / "results.json").write_text(json.dumps(results))
    command = " ".join(["moe-zero bench", *options.suites])
    (options.out / "report.md").write_text(markdown(cases, results, command))
    if any(case.ours and case.rival for case in cases):
        draw(cases, options.out / "report.png")
    print(f"wrote {options.out / 'report.md'}")
    return 0


def _measure(suites: Sequence[str], out: Path) -> dict:
    results: dict = {"benchmarks": []}
    if files := [str(FOLDER / f"test_{suite}.py") for suite in suites if suite != ZERO3]:
        path = out / "results.json"
        # A configuration of the folder one happens to be in must not change what is measured.
        apart = ["-c", "/dev/null", "--rootdir", str(FOLDER), "--import-mode=importlib", "-p", "no:cacheprovider"]
        tables = ["--benchmark-columns=median,iqr,rounds", "--benchmark-sort=name", f"--benchmark-json={path}"]
        _run(["-m", "pytest", "-q", "-rs", *files, *apart, *tables], "a suite")
        results = json.loads(path.read_text())
    if ZERO3 in suites:
        path = out / "zero3.json"
        _run([str(FOLDER / "zero3_compare.py"), "--json", str(path)], "the ZeRO-3 comparison")
        results[ZERO3] = json.loads(path.read_text())
        path.unlink()
    return results
