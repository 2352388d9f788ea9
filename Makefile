# Two commands do all set-up: `make demo` and `make test`.
#
# torch: a machine with an NVIDIA GPU keeps the torch that its Python has, or gets the default
# build; a machine without one gets the small CPU build of one pinned version.
PYTHON ?= python3
# `make test TORCH=2.15.0` tests another release, in an environment of its own. For any but this one
# pip brings several GB of CUDA packages along.
TORCH ?= 2.13.0
VENV ?= .venv$(addprefix -,$(filter-out 2.13.0,$(TORCH)))
BIN := $(VENV)/bin
ONLY := $(VENV)/torch-only
CPU_TORCH := torch==$(TORCH)
# For the tests' interpreter, where torch brings no triton: its CPU build does not.
CPU_TRITON := triton==3.6.0
# Show errors only: pip warns at each call of folders in its configuration that do not exist.
PIP := -m pip install -qq
# Let Python write .pyc files: each of the tests' many processes would compile modules again.
export PYTHONDONTWRITEBYTECODE :=
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: help demo test test-exhaustive test-all test-torch-only lint docs dist clean
help:
	@echo "make demo   install, then train a small Llama in float8 next to high precision"
	@echo "make test   install, then run a test of each promise (TORCH=2.15.0: with that release)"
	@echo "make test-all  the same, then the tests of many combinations, which take longer"
	@echo "make test-torch-only  the samples of README and docs with torch and the built wheel alone"
	@echo "make lint   install, then ruff, type checker, import-linter, budgets of lines"
	@echo "make docs   build the site of README and docs/ into site/, with an API reference"
	@echo "make dist   build wheel and sdist into dist/"
	@echo "make clean  remove the environment and caches; runs/ stays"

$(BIN)/python:
ifeq ($(HAS_GPU),yes)
	$(PYTHON) -m venv --system-site-packages $(VENV)
else
	$(PYTHON) -m venv $(VENV)
endif

$(VENV)/torch.done: $(BIN)/python
	@echo "installing torch into $(VENV)"
ifeq ($(HAS_GPU),yes)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python $(PIP) "torch>=2.11"
else
	$(BIN)/python $(PIP) $(CPU_TORCH)
endif
	touch $@

$(VENV)/cli.done: $(VENV)/torch.done pyproject.toml
	@echo "installing float8 with its command line"
	$(BIN)/python $(PIP) --editable ".[cli]"
	touch $@

$(VENV)/dev.done: $(VENV)/cli.done tests/no_deps.txt
	@echo "installing what the tests run against, and linters"
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python $(PIP) $(CPU_TRITON)
	$(BIN)/python $(PIP) --editable ".[dev]"
	$(BIN)/python $(PIP) --no-deps --no-build-isolation --requirement tests/no_deps.txt
	touch $@

demo: $(VENV)/cli.done
	$(BIN)/float8 compare tensorwise --output runs/demo --overwrite

# With it `needs_installed` of the tests raises in place of skipping.
PYTEST = FLOAT8_TESTS_MUST_RUN=1 $(BIN)/python .ci/cpu_seconds $(BIN)/python -m pytest -n 2 --dist loadgroup

test: $(VENV)/dev.done
	$(PYTEST) -m "not exhaustive"

test-exhaustive: $(VENV)/dev.done
	$(PYTEST) -m exhaustive

test-all:
	$(MAKE) test
	$(MAKE) test-exhaustive

# Of its own, without NumPy, which the CPU build of torch does not bring along.
$(ONLY)/done:
	$(PYTHON) -m venv $(ONLY)
	$(ONLY)/bin/python $(PIP) $(CPU_TORCH)
	touch $@

# What users of a release get: the wheel, not this folder.
test-torch-only: dist $(ONLY)/done
	$(ONLY)/bin/python $(PIP) --force-reinstall --no-deps dist/*.whl
	$(ONLY)/bin/python -m pip check
	$(ONLY)/bin/python tests/torch_only.py

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines

docs: $(VENV)/dev.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/dev.done
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
