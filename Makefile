# Two commands do everything on a fresh machine with Python and make: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: train test lint bench clean

train: $(READY)  ## the main job: for now the paper's Figure 3, recomputed
	$(BIN)/modelmix reproduce fig3 --out results

test: $(READY)  ## every test
	$(BIN)/python -m pytest

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## speed of the accountant
	$(BIN)/python benchmarks/accountant.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) results build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
