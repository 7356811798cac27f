"""Tunes the tiles of the experts' products on the GPU at hand and rewrites their tables in ``tuning.py``.

    python -m moe_zero.triton_kernels.tune             # every row of this GPU's tables, a few minutes
    python -m moe_zero.triton_kernels.tune --dry-run   # without a GPU: compiles the candidates, says which would fit

A candidate is timed only if its kernels, compiled ahead of time for the capability, spill no registers and fit into
shared memory. The row of the table takes the fastest one, unless the present one is within 2 %. Commit the result.

Legend of shape suffixes: T tokens, K experts per token, D hidden size, F FFN width, E experts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from . import ffn, tuning
from .resources import SHARED_MEMORY_LIMIT, compile_launch, record
from .tuning import ProductConfig

BEGIN = "# --- Written by tune.py: tiles by capability and by rows per expert, up to the first number.\n"
END = "# --- End of what tune.py writes.\n"
MARGIN = 0.98
"""A new tile must take at most this share of the present one's time to replace it."""
LARGEST_ROWS = 8192
"""Rows per expert with which the last, open row of a table is tuned."""

Table = dict[int, tuple[tuple[int | None, ProductConfig], ...]]


@dataclass(frozen=True)
class Problem:
    """Sizes to tune for; bf16, every expert with the same number of rows."""

    rows_per_expert: int
    experts: int = 8
    top_k: int = 2
    hidden: int = 768
    width: int = 3072

    def tensors(self, device: str) -> tuple:
        """x, ids, weights, parameters and the gradient of the result."""
        T = max(1, self.rows_per_expert * self.experts // self.top_k)
        E, D, F = self.experts, self.hidden, self.width

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)

        ids = torch.arange(T * self.top_k, device=device).view(T, self.top_k) % E
        params = [[new(*shape)] for shape in ((E, F, D), (E, F), (E, D, F), (E, D))]
        return new(T, D), ids, new(T, self.top_k, dtype=torch.float32), params, new(T, D)


def run_products(problem: Problem, device: str) -> Callable[[ProductConfig], None]:
    """The experts' forward pass, and the product that makes two results of its GELU's backward pass."""
    x_TD, ids_TK, weights_TK, params, grad_TD = problem.tensors(device)
    needs = [True, True, False, False, False, False]

    def run(config: ProductConfig) -> None:
        _, pre, order, offsets = ffn.gelu_ffn_forward(x_TD, ids_TK, weights_TK, *params, False, True, config)
        state = (pre, order, offsets, False, problem.top_k, False, True, needs)
        ffn.gelu_ffn_backward(grad_TD, x_TD, weights_TK, *params, *state, replace(config, block_n=64))

    return run


def run_weight_gradients(problem: Problem, device: str) -> Callable[[ProductConfig], None]:
    """The gradients of both weights."""
    x_TD, ids_TK, _, _, grad_TD = problem.tensors(device)
    N = ids_TK.numel()
    inner_NF = torch.empty(N, problem.width, dtype=x_TD.dtype, device=device).normal_()
    order = torch.argsort(ids_TK.flatten(), stable=True).int()
    offsets = torch.arange(problem.experts + 1, device=device, dtype=torch.int32) * (N // problem.experts)
    rows = ffn._Rows(problem.experts, N, order, offsets, K=problem.top_k)

    def run(config: ProductConfig) -> None:
        ffn._weight_gradient(rows, grad_TD, inner_NF, gather_a=True, gather_b=False, config=config)
        ffn._weight_gradient(rows, inner_NF, x_TD, gather_a=False, gather_b=True, config=config)

    return run


KINDS = {
    "PRODUCTS": (run_products, "product_kernel"),
    "WEIGHT_GRADIENTS": (run_weight_gradients, "weight_gradient_kernel"),
}


def candidates(kind: str, capability: int, rows_per_expert: int) -> Iterator[ProductConfig]:
    """Tiles worth a try: no taller than the rows need, and within shared memory by what their stages hold."""
    if kind == "PRODUCTS":
        tallest = max(16, min(128, tuning._power_of_2(rows_per_expert)))
        heights = [m for m in (16, 32, 64, 128) if tallest // 4 <= m <= tallest]
        widths, depths, stages = (64, 128, 256), (32, 64, 128), (3, 4)
    else:
        heights, widths, depths, stages = (64, 128), (64, 128), (32, 64), (4, 5)
    for m, n, k, warps, count in itertools.product(heights, widths, depths, (4, 8), stages):
        loads = (m + n) * k * 2 * (count - 1)
        if loads <= SHARED_MEMORY_LIMIT[capability] and 512 <= m * n // warps <= 4096:
            yield ProductConfig(m, n, k, warps, count)


def misfit(kind: str, capability: int, config: ProductConfig, problem: Problem) -> str:
    """Why a candidate cannot be used on ``capability``; empty if it can. Needs no GPU."""
    run, kernel = KINDS[kind]
    with record(capability) as launches:
        run(problem, "meta")(config)
    for launch in {launch.key: launch for launch in launches if launch.name == kernel}.values():
        try:
            resources = compile_launch(launch, capability)
        except Exception as error:  # whatever the compiler stumbles over: the tile is of no use
            return f"does not compile: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        if resources.stack_bytes:
            return f"spills {resources.stack_bytes} bytes of {resources.registers} registers"
        if resources.shared_bytes > SHARED_MEMORY_LIMIT[capability]:
            return f"takes {resources.shared_bytes} bytes of shared memory, of {SHARED_MEMORY_LIMIT[capability]}"
    return ""


def fastest(
    present: ProductConfig, others: Iterable[ProductConfig], seconds: Callable[[ProductConfig], float]
) -> tuple[ProductConfig, float]:
    """The tile to put into the table and how much faster than the present one it is."""
    before = seconds(present)
    timed = [(seconds(config), config) for config in others]
    time, best = min(timed, key=lambda pair: pair[0], default=(before, present))
    return (best, before / time) if time <= MARGIN * before else (present, 1.0)


def render(tables: dict[str, Table]) -> str:
    """The tables as source text, as ``ruff format`` would lay it out."""
    lines = []
    for name, table in tables.items():
        lines.append(f"{name} = {{")
        for capability in sorted(table):
            lines.append(f"    {capability}: (")
            for limit, config in table[capability]:
                lines.append(f"        ({limit}, ProductConfig({', '.join(map(str, astuple(config)))})),")
            lines.append("    ),")
        lines.append("}")
    return "\n".join(lines) + "\n"


def rewrite(path: Path, tables: dict[str, Table]) -> None:
    """Put the tables into the source file between its two marks."""
    source = path.read_text()
    if source.count(BEGIN) != 1 or source.count(END) != 1:
        raise ValueError(f"{path} does not hold the lines {BEGIN.strip()!r} and {END.strip()!r} once each")
    head, rest = source.split(BEGIN)
    path.write_text(head + BEGIN + render(tables) + END + rest.split(END)[1])


def present_tables() -> dict[str, Table]:
    return {kind: dict(getattr(tuning, kind)) for kind in KINDS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_zero.triton_kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="compile candidates, time none, write nothing")
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_MEMORY_LIMIT), help="of the GPU to do as if")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="tables to tune; default all")
    parser.add_argument("--rows", type=int, action="append", help="rows per expert to tune for; default every row")
    parser.add_argument("--most", type=int, help="candidates for each row; default all")
    parser.add_argument("--table", type=Path, default=Path(tuning.__file__), help="file to rewrite")
    args = parser.parse_args(argv)
    if not args.dry_run:
        if args.capability:
            parser.error("--capability needs --dry-run: tiles are timed on the GPU that is there")
        if not torch.cuda.is_available():
            parser.error("there is no CUDA device to time on; --dry-run does what can be done without")
    capability = args.capability or (90 if args.dry_run else tuning._nearest(tuning.capability(torch.device("cuda"))))
    tables = present_tables()
    for kind in args.kind or KINDS:
        tables[kind][capability] = tuple(
            (limit, _tune(kind, capability, limit, config, args) if _wanted(limit, args.rows) else config)
            for limit, config in tables[kind][capability]
        )
    if args.dry_run:
        print("dry run: nothing written")
    else:
        rewrite(args.table, tables)
        print(f"wrote {args.table}")


def _wanted(limit: int | None, rows: Sequence[int] | None) -> bool:
    return rows is None or (limit or LARGEST_ROWS) in rows


def _tune(kind: str, capability: int, limit: int | None, present: ProductConfig, args) -> ProductConfig:
    problem = Problem(limit or LARGEST_ROWS)
    print(f"{kind}, capability {capability}, {problem.rows_per_expert} rows per expert; now {present}", flush=True)
    fitting = []
    others = [config for config in candidates(kind, capability, problem.rows_per_expert) if config != present]
    for config in [present, *others[: args.most]]:
        reason = misfit(kind, capability, config, problem)
        print(f"  {config}: {reason or 'fits'}", flush=True)
        if not reason:
            fitting.append(config)
    if args.dry_run:
        return present
    import triton.testing

    run = KINDS[kind][0](problem, "cuda")
    best, gain = fastest(present, fitting, lambda config: triton.testing.do_bench(lambda: run(config), rep=50))
    print(f"  best {best}, {gain:.2f} x", flush=True)
    return best


if __name__ == "__main__":
    main()
