"""Prints what each kernel needs of a GPU, as a table in Markdown. Needs no GPU.

    python -m moe_zero.triton_kernels.survey                    # all capabilities, about a minute
    python -m moe_zero.triton_kernels.survey --capability 90    # one of them

Rows are launches of typical sizes (D=768, F=3072, 8 experts of which a token takes 2, bf16 unless said otherwise) with
the tiles of ``tuning.py``. "Spills" are bytes of a thread's stack.

Legend of shape suffixes: T tokens, K experts per token, D hidden size, F FFN width, E experts, Q rows per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import beam, combine, ffn, gate
from .resources import SHARED_MEMORY_LIMIT, Launch, Resources, compile_launch, record

D, F, E, K = 768, 3072, 8, 2


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fp32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _ids(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def run_gate(T: int, Q: int = 1, experts: int = E) -> None:
    x, router = _meta(T, Q, D), _meta(experts, D)
    weights, ids, probs, _, importance, logsumexp = gate.gate_forward(x, router, K, True)
    gate.gate_backward(weights, probs, importance, logsumexp, x, router, ids, probs, True)


def run_ffn(rows_per_expert: int, dtype: torch.dtype = torch.bfloat16) -> None:
    T = rows_per_expert * E // K
    x, ids, weights = _meta(T, D, dtype=dtype), _ids(T, K), _fp32(T, K)
    params = [[_meta(*shape, dtype=dtype)] for shape in ((E, F, D), (E, F), (E, D, F), (E, D))]
    y, *state = ffn.gelu_ffn_forward(x, ids, weights, *params, False, True)
    ffn.gelu_ffn_backward(y, x, weights, *params, *state, False, K, False, True, [True] * 6)


def run_post_route(G: int = 64, Q: int = 32) -> None:
    x, folded = _meta(G * Q, D), _fp32(E, F)
    logits, pre = ffn.post_route_up(x, Q, [_meta(E, F, D)], [_meta(E, F)], folded, False)
    ffn.post_route_up_backward(logits, pre, x, Q, [_meta(E, F, D)], folded, pre, False, [False, False, False, True])


def run_combine(T: int, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
    y, residual = _meta(T, K, width, dtype=dtype), _meta(T, width, dtype=dtype)
    weights, gain, bias = _fp32(T, K), _fp32(width), _fp32(width)
    out, mean, rstd = combine.combine_forward(y, weights, residual, gain, bias, 1e-12, dtype)
    combine.combine_backward(out, y, weights, residual, gain, mean, rstd, (y, weights, residual, gain, bias))


def run_beam_step(J: int, R: int) -> None:
    beam.beam_step(_fp32(16, J), _fp32(16 * J, R), J, _ids(16, J, 5))


CASES: dict[str, Callable[[], None]] = {
    "gate, 1024 tokens": lambda: run_gate(1024),
    "gate, 65536 tokens": lambda: run_gate(65536),
    "gate, 65536 tokens, 256 experts": lambda: run_gate(65536, experts=256),
    "gate, 64 means of 32 rows": lambda: run_gate(64, 32),
    "gelu_ffn, 16 rows per expert": lambda: run_ffn(16),
    "gelu_ffn, 512 rows per expert": lambda: run_ffn(512),
    "gelu_ffn, 8192 rows per expert": lambda: run_ffn(8192),
    "gelu_ffn, 8192 rows per expert, fp32": lambda: run_ffn(8192, torch.float32),
    "post-route logits, 64 groups of 32 rows": run_post_route,
    "combine, D=768": lambda: run_combine(4096, 768),
    "combine, D=8192": lambda: run_combine(4096, 8192),
    "combine, D=8192, fp32": lambda: run_combine(4096, 8192, torch.float32),
    "beam_step, 7 beams and experts": lambda: run_beam_step(7, 7),
}


def survey(capability: int) -> Iterator[tuple[str, ...]]:
    """Rows of the table for one capability (90 is 9.0). Of launches that look alike, the one with most registers."""
    for case, run in CASES.items():
        with record(capability) as launches:
            run()
        rows: dict[tuple[str, ...], list[Resources]] = {}
        for launch in {launch.key: launch for launch in launches}.values():
            rows.setdefault((launch.name.strip("_"), *_columns(launch)), []).append(compile_launch(launch, capability))
        for columns, found in rows.items():
            most = max(found, key=lambda resources: (resources.stack_bytes, resources.registers))
            yield (
                f"{capability // 10}.{capability % 10}",
                case,
                *columns,
                str(most.registers),
                str(most.stack_bytes),
                f"{most.shared_bytes / 1024:.1f}",
                ", ".join(most.matrix_instructions) or "-",
            )


def _columns(launch: Launch) -> tuple[str, str, str]:
    """What distinguishes a launch: epilogue, tile, and warps and stages."""
    constants = launch.constexprs
    tile = " x ".join(f"{constants[name]} {name[-1]}" for name in constants if name.startswith("BLOCK_"))
    options = "/".join(str(launch.options.get(name, "-")) for name in ("num_warps", "num_stages"))
    return str(constants.get("EPILOGUE", "-")), tile or "-", options


HEADER = "capability | case | kernel | epilogue | tile | warps/stages | registers | spills | shared KiB | matrix"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_zero.triton_kernels.survey", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_MEMORY_LIMIT), help="default all")
    args = parser.parse_args(argv)
    print(f"| {HEADER} |\n|{'---|' * len(HEADER.split('|'))}")
    for capability in [args.capability] if args.capability else sorted(SHARED_MEMORY_LIMIT):
        for row in survey(capability):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
