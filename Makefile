# `make demo` and `make test` do all set-up themselves: they create .venv, install the pinned packages, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast check format clean

demo: $(READY)
	$(BIN)/holdfast demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Everything that starts no processes: an answer within 90 seconds on two cores.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
