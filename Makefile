# Each target sets up what it needs: a fresh clone and Python 3.11 are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# Two-core machines and tests alike: ranks share the cores, so each keeps to one thread unless told otherwise.
export OMP_NUM_THREADS ?= 1

# How long `make fuzz` goes on.
FUZZ_SECONDS ?= 600

.PHONY: setup demo test lint types unit soak chaos fuzz bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@mkdir -p .pyroot && ln -sfn .. .pyroot/seqmesh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	@touch $@

demo: setup
	$(BIN)/seqmesh demo runs/demo

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy
	$(BIN)/mypy tests

unit: setup
	$(BIN)/pytest

soak: setup
	$(BIN)/python -m tests.soak

chaos: setup
	$(BIN)/python -m tests.chaos

fuzz: setup
	$(BIN)/python -W ignore -m tests.fuzz $(FUZZ_SECONDS)

bench: setup
	$(BIN)/seqmesh bench all --quick

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
