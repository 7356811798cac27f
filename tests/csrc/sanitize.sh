#!/usr/bin/env bash
# Builds the extensions with AddressSanitizer and UndefinedBehaviorSanitizer in a copy of the tree and runs the tests of
# the flat buffers and of the experts' operators over them. PYTHON: an interpreter with torch, setuptools, pybind11,
# ninja, pytest and hypothesis.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r setup.py pyproject.toml README.md LICENSE csrc triton_kernels moe_zero tests "$copy"
rm -f "$copy"/moe_zero/*.so
cd "$copy"
MOE_ZERO_SANITIZE=1 MOE_ZERO_BUILD_CUDA=0 "$python" setup.py build_ext --inplace >build.log 2>&1 ||
    { cat build.log; exit 1; }

# The interpreter is not instrumented, so the runtimes have to be loaded first; it and torch leak by design at exit.
preload=$("${CXX:-g++}" -print-file-name=libasan.so):$("${CXX:-g++}" -print-file-name=libubsan.so)
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$copy" PYTHONDONTWRITEBYTECODE=1
LD_PRELOAD="$preload" "$python" -c '
import moe_zero._extensions as extensions
assert all(e.path.startswith("'"$copy"'") and e.loaded for e in extensions.extensions()[:2]), extensions.extensions()'
LD_PRELOAD="$preload" "$python" -m pytest -q -p no:cacheprovider tests/ops/test_flat.py \
    tests/ops/test_instruction_sets.py tests/ops/test_messages.py \
    --deselect tests/ops/test_instruction_sets.py::test_without_the_compiled_extension "$@"
