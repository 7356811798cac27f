"""The command ``moe-zero``.

``doctor`` must work where nothing but torch is installed, and ``bench`` with the extra of that name, so they are
dispatched before anything else is imported. The other commands come from `moe_zero.recipes.commands`, which needs the
extra ``train``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

LIBRARIES = ("typer", "rich", "yaml", "numpy", "PIL", "matplotlib", "tokenizers", "safetensors")
"""What every command but ``doctor`` imports."""
HELP = """\
usage: moe-zero COMMAND [options]

Train, evaluate and use a mixture-of-experts Q-Former that is sharded over processes.

commands:
  train    train on photographs and captions, evaluate retrieval, draw plots
  plan     say what training will hold and send on each rank, before anything is launched
  eval     evaluate a finished run again, also on other data
  query    rank pictures for a sentence, or captions for a picture
  caption  write captions of pictures with a finished run
  routes   draw the beams of experts that pictures went through
  convert  turn a Q-Former checkpoint of transformers, LAVIS or BERT into ours, or ours into theirs
  bench    measure every operator against its rivals on this machine, and write a report
  doctor   say what works on this machine, what is missing and what to do

examples:
  moe-zero doctor
  moe-zero train --nproc 2 --out runs/demo
  moe-zero train --data captions.jsonl --config my.yaml --lr 1e-4
  moe-zero train --out runs/demo --resume
  moe-zero query --run runs/demo --text "a cup of coffee"
  moe-zero query --run runs/demo --image photo.jpg
  moe-zero caption --run runs/demo photo.jpg
  torchrun --nproc-per-node 4 -m moe_zero.cli train --out runs/big

'moe-zero COMMAND --help' lists the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0; 1 when it failed; 2 for wrong usage; 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"moe-zero {version('moe-zero')}")
        return 0
    if arguments[0] == "doctor":
        from moe_zero import doctor

        return doctor.main(arguments[1:]) or 0
    if arguments[0] == "bench":
        from moe_zero.benchmarks import report

        return report.main(arguments[1:])
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"moe-zero {arguments[0]} needs {', '.join(missing)}: pip install 'moe-zero[train]'", file=sys.stderr)
        return 1
    from moe_zero.recipes import commands

    return commands.main(arguments)


def _main_of_a_rank() -> None:
    """Entry of ``python -m moe_zero.cli``: what torchrun starts."""
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # gloo's threads may still be busy while the interpreter winds down, which has aborted ranks that were done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _main_of_a_rank()
