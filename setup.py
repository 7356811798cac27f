"""Builds the extensions of moe-zero; everything else is declared in pyproject.toml.

Three shared libraries, each as independent of its surroundings as it can be:

- ``moe_zero._flat_plan``: pybind11, no torch.
- ``moe_zero._ops_cpu``: operators against PyTorch's stable ABI, so that one build serves every torch from 2.10 on.
- ``moe_zero._ops_cuda``: the same for CUDA, if the building torch has CUDA and an nvcc of its major version is found.

Environment: ``MOE_ZERO_BUILD_CUDA`` = ``auto`` (default), ``0`` or ``1`` (fail rather than skip);
``TORCH_CUDA_ARCH_LIST`` as for any torch extension; ``MAX_JOBS``; ``MOE_ZERO_SANITIZE=1`` builds the host code with
AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import torch
import torch.utils.cpp_extension as cpp_extension
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHITECTURES = ("8.0", "9.0", "10.0", "12.0")
# The lowest torch whose stable ABI has all that the sources use; without it the library would ask for the building one.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
WINDOWS = sys.platform == "win32"


def host_flags() -> list[str]:
    if WINDOWS:
        return ["/O2", "/std:c++20", "/fp:precise"]
    # No contraction into fused multiply-adds: results must not depend on the instruction set. -g0 because torch's
    # headers make debug information far larger than the code.
    flags = ["-O3", "-std=c++20", "-g0", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off"]
    flags += ["-fvisibility=hidden", f"-ffile-prefix-map={ROOT}=."]
    if os.environ.get("MOE_ZERO_SANITIZE") == "1":
        flags += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    return flags


def link_flags() -> list[str]:
    if os.environ.get("MOE_ZERO_SANITIZE") == "1":
        return ["-fsanitize=address,undefined"]
    return [] if WINDOWS else ["-Wl,--as-needed"] if sys.platform == "linux" else []


def nvcc_version(home: Path) -> str | None:
    """Version of the toolkit at ``home``, or None if that is no complete toolkit (a wrapper script in bin, say)."""
    nvcc = home / "bin" / ("nvcc.exe" if WINDOWS else "nvcc")
    if not nvcc.exists() or not (home / "include" / "cuda_runtime_api.h").exists():
        return None
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", output)
    return match.group(1) if match else None


def cuda_home_candidates() -> list[Path]:
    candidates = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + [cpp_extension.CUDA_HOME]
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    major = (torch.version.cuda or "").split(".")[0]
    candidates += sorted((str(path) for path in Path("/usr/local").glob(f"cuda-{major}*")), reverse=True)
    candidates.append("/usr/local/cuda")
    return list(dict.fromkeys(Path(candidate) for candidate in candidates if candidate))


def find_cuda() -> tuple[Path | None, str]:
    """The toolkit to build with, or None and the reason."""
    wanted = os.environ.get("MOE_ZERO_BUILD_CUDA", "auto").lower()
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"MOE_ZERO_BUILD_CUDA is {wanted!r}; it must be auto, 0 or 1")
    if wanted == "0":
        return None, "MOE_ZERO_BUILD_CUDA=0"
    if torch.version.cuda is None:
        reason, remedy = f"the building torch {torch.__version__} has no CUDA", "Install a CUDA build of torch"
    else:
        found = {home: version for home in cuda_home_candidates() if (version := nvcc_version(home))}
        major = torch.version.cuda.split(".")[0]
        for home, version in found.items():
            if version.split(".")[0] == major:
                return home, ""
        have = ", ".join(f"{version} in {home}" for home, version in found.items()) or "none"
        reason = f"torch {torch.__version__} needs nvcc of CUDA {major}.x; found: {have}"
        remedy = f"Install the CUDA toolkit {torch.version.cuda} and point CUDA_HOME at it"
    if wanted == "1":
        raise SystemExit(
            f"MOE_ZERO_BUILD_CUDA=1, but the CUDA operators cannot be built: {reason}. {remedy} (and, to build against "
            "the torch of this environment, add --no-build-isolation)."
        )
    return None, reason


def cuda_architectures(home: Path) -> str:
    """TORCH_CUDA_ARCH_LIST if set, else what this nvcc can compile of the default list, with PTX of the newest."""
    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    output = subprocess.run(
        [home / "bin" / "nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=False
    ).stdout
    known = set(re.findall(r"compute_(\d+)", output))
    chosen = [arch for arch in DEFAULT_ARCHITECTURES if arch.replace(".", "") in known] or ["8.0"]
    return ";".join(chosen) + "+PTX"


HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
# As system headers, so that warnings are about our own code.
TORCH_INCLUDES = [
    flag for path in cpp_extension.include_paths() for flag in (("/I", path) if WINDOWS else ("-isystem", path))
]
CSRC = str(ROOT / "csrc")  # absolute: ninja runs elsewhere
LAYOUT_SOURCES = ["csrc/flat_plan.cpp"]
VIEW_SOURCES = [*LAYOUT_SOURCES, "csrc/tensor_view.cpp"]


def flat_plan_extension() -> Extension:
    return Extension(
        "moe_zero._flat_plan",
        sources=["csrc/flat_plan_module.cpp", *LAYOUT_SOURCES],
        depends=HEADERS,
        include_dirs=[CSRC, pybind11.get_include()],
        extra_compile_args={"cxx": host_flags()},
        extra_link_args=link_flags(),
    )


def cpu_extension() -> Extension:
    return Extension(
        "moe_zero._ops_cpu",
        sources=[
            "csrc/ops.cpp",
            *VIEW_SOURCES,
            *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*_cpu*.cpp")),
        ],
        depends=HEADERS,
        libraries=["torch_cpu"],
        py_limited_api=True,
        include_dirs=[CSRC],
        library_dirs=cpp_extension.library_paths(),
        extra_compile_args={"cxx": [*host_flags(), *TORCH_INCLUDES, STABLE_ABI]},
        extra_link_args=link_flags(),
    )


def cuda_extension(home: Path) -> Extension:
    cpp_extension.CUDA_HOME = str(home)
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_architectures(home)
    nvcc_flags = ["-O3", "-std=c++20", "--fmad=false", "-Xcompiler", "-fvisibility=hidden", "--threads", "2"]
    return Extension(
        "moe_zero._ops_cuda",
        sources=["csrc/cuda/ops_cuda.cpp", "csrc/cuda/flat_cuda.cu", *VIEW_SOURCES],
        depends=HEADERS,
        include_dirs=[CSRC, str(home / "include")],
        library_dirs=[*cpp_extension.library_paths(), str(home / "lib64"), str(home / "lib")],
        # The static runtime: it talks to whatever driver is there, and needs no libcudart of a certain version.
        libraries=["torch_cpu", "torch_cuda", "cudart_static", "rt", "pthread", "dl"],
        py_limited_api=True,
        extra_compile_args={"cxx": [*host_flags(), *TORCH_INCLUDES, STABLE_ABI, "-DUSE_CUDA"], "nvcc": nvcc_flags},
        extra_link_args=link_flags(),
    )


class BuildExtension(cpp_extension.BuildExtension):
    """Adds the record of what was built, which ``moe-zero doctor`` reads (pip hides what a build prints)."""

    def build_extensions(self) -> None:
        super().build_extensions()
        info = {
            "torch": torch.__version__,
            "built": [extension.name for extension in self.extensions],
            "skipped": {"moe_zero._ops_cuda": CUDA_SKIPPED} if CUDA_SKIPPED else {},
            "cuda": nvcc_version(CUDA_HOME) if CUDA_HOME else None,
            "cuda_architectures": os.environ.get("TORCH_CUDA_ARCH_LIST", "") if CUDA_HOME else "",
        }
        self.build_info.write_text(json.dumps(info, indent=2) + "\n")
        built = ", ".join(name.removeprefix("moe_zero.") for name in info["built"])
        cuda = f"CUDA {info['cuda']} for {info['cuda_architectures']}" if CUDA_HOME else f"no CUDA ({CUDA_SKIPPED})"
        print(f"moe-zero: built {built} against torch {torch.__version__}; {cuda}", flush=True)

    @property
    def build_info(self) -> Path:
        return Path(self.build_lib) / "moe_zero" / "_build_info.json"

    def copy_extensions_to_source(self) -> None:  # editable and --inplace builds
        super().copy_extensions_to_source()
        shutil.copy(self.build_info, ROOT / "moe_zero" / self.build_info.name)

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), str(self.build_info)]

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        if self.inplace:
            mapping[str(self.build_info)] = str(ROOT / "moe_zero" / self.build_info.name)
        return mapping


CUDA_HOME, CUDA_SKIPPED = find_cuda()

setup(
    packages=[
        "moe_zero",
        *sorted(
            ".".join(path.parent.relative_to(ROOT).parts)
            for path in (ROOT / "moe_zero").rglob("__init__.py")
            if path.parent != ROOT / "moe_zero"
        ),
        "moe_zero.triton_kernels",
        "moe_zero.benchmarks",
    ],
    package_dir={"moe_zero.triton_kernels": "triton_kernels", "moe_zero.benchmarks": "benchmarks"},
    include_package_data=False,
    package_data={"moe_zero": ["_build_info.json", "**/*.json", "**/*.yaml", "**/*.jsonl", "py.typed"]},
    ext_modules=[flat_plan_extension(), cpu_extension(), *([cuda_extension(CUDA_HOME)] if CUDA_HOME else [])],
    cmdclass={"build_ext": BuildExtension},
)
