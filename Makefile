# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint test-cpu test-simulator test-compile gate test-gate fuzz gpu clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[demo,test]'
	touch $@

demo: $(VENV)/.demo  ## train a character model on Shakespeare and sample from it
	$(BIN)/nbtrain train --shakespeare --out runs/demo

test: lint test-cpu test-simulator test-compile  ## what CI runs; needs no GPU

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-cpu: $(VENV)/.test  ## CPU twins and everything above them
	NBTRAIN_TARGET=none $(BIN)/python -m pytest -n 2 --ignore=tests/amd

test-simulator: $(VENV)/.test  ## the kernels themselves, run in Python
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -n 2 tests/ops

test-compile: $(VENV)/.test  ## every kernel for sm_80 and sm_90, through ptxas
	$(BIN)/python -m pytest -n 2 -m compile tests/test_compile.py tests/test_ahead.py

gate:  ## every kernel for AMD's gfx90a, gfx942 and gfx1100; makes an environment of its own
	$(PYTHON) tests/amd/gate.py

test-gate: $(VENV)/.test  ## that the gate refuses broken kernels, and the calls of ROCm; after make gate
	$(BIN)/python -m pytest tests/amd

fuzz: $(VENV)/.test  ## damaged files, other ones each time, 5000 a test
	NBTRAIN_TARGET=none NBTRAIN_FUZZ=5000 $(BIN)/python -m pytest -n 2 --timeout 0 tests/fuzz

gpu:  ## on a machine with a GPU, in the environment that python3 is
	$(PYTHON) -m pytest -m gpu

clean:
	rm -rf $(VENV) build *.egg-info
