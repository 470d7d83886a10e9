# Every target sets up what it needs: it creates .venv and installs the pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs

.PHONY: demo test test-fast check docs format clean

demo: $(READY)
	$(BIN)/holdfast demo

# Three processes on two cores: half of the time, tests wait for the processes that they start.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# The tests that start no processes: within 90 seconds on two cores.
test-fast: $(READY)
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_prose.py

# The documentation site, in site/. A broken link, an unknown name or a page that is in no menu is an error.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/list_packages.py

clean:
	rm -rf $(VENV) site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdfast needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_READY)
