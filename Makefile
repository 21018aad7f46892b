# Two commands do everything on a fresh machine with Python and make: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: help train test test-gpu lint bench mutants clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

train: $(READY)  ## private training on the embedded images, with a report at the end
	$(BIN)/modelmix train

test: $(READY)  ## every test; those of the library first, without the laboratory
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest lab/tests

test-gpu: $(READY)  ## engines, kernels and clipping on a CUDA device
	MODELMIX_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 0 tests/training/test_gpu.py tests/gradients/test_kernels.py \
		tests/gradients/test_engines.py tests/gradients/test_forms.py

lint: $(READY)  ## style, types, and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## speed of the accountant and of training
	$(BIN)/python benchmarks/accountant.py
	$(BIN)/python benchmarks/training.py

mutants: $(READY)  ## which bugs in the accountant no test would see; MUTANTS='--files training/rules.py' asks for others
	$(BIN)/python tools/mutants.py --jobs 2 $(MUTANTS)

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./lab
	touch $(READY)

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) results runs build dist src/*.egg-info lab/src/*.egg-info lab/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
