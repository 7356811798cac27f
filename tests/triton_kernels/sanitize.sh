#!/usr/bin/env bash
# Runs sanitize.py in a virtual environment of its own, made at the first call: triton-viz works neither with the Triton
# that torch brings nor with NumPy from 2.4 on. PYTHON: an interpreter with moe_zero, torch and pytest, which the
# environment borrows. SANITIZER_VENV: where the environment goes.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
environment=${SANITIZER_VENV:-.venv/sanitizer}
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
if [ ! -e "$environment/.complete" ]; then
    "$python" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install -q --disable-pip-version-check triton==3.6.0 triton-viz==3.0 "numpy<2.4"
    echo "import site; site.addsitedir('$(packages "$python")')" >"$(packages "$environment/bin/python")/borrowed.pth"
    touch "$environment/.complete"
fi
TRITON_INTERPRET=1 "$environment/bin/python" tests/triton_kernels/sanitize.py "$@"
