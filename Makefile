# Each goal does its own set-up: Python 3.11 (or newer) and make are all that must be there before.

# `make PYTHON=/path/to/python3.12 test` picks another interpreter.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# Idle OpenMP threads sleep instead of spinning: spinning ones take the cores that the decode loop needs.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test notebooks lint format nightly demo-model clean
# Two goals that install into the same environment must not run at the same time under `make -j`.
.NOTPARALLEL:

help:  ## list the goals
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(VENV)/ready-engine  ## replay the built-in chats on SmolLM2, with the cache and without it
	$(BIN)/radixkv replay --compare

test: lint demo-model  ## lint, then the whole test suite
	$(BIN)/python -m pytest

notebooks: $(VENV)/ready-test,notebooks demo-model  ## execute every notebook, from top to bottom
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=900 -p no:cacheprovider notebooks

lint: $(VENV)/ready-test,lint  ## ruff (rules and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/ready-test,lint  ## rewrite the files as `make lint` wants them
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

nightly: $(VENV)/ready-test,lint demo-model  ## the suite with long hypothesis runs on new random examples
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest

# The model is a convenience for the tests: where it cannot be had, those that need it skip and say so. The hook turns the
# traceback of a failed fetch into one line.
demo-model: $(VENV)/ready-test,lint  ## fetch the demo model, once for all checkouts
	@test -n "$$RADIXKV_DEMO_MODEL" || $(BIN)/python -c "import sys; \
	sys.excepthook = lambda kind, error, trace: print(f'No demo model, its tests will skip: {error}', file=sys.stderr); \
	from engine.models.smollm2 import demo_model_directory; demo_model_directory()" || true

clean:  ## remove the environment, builds and caches (not the demo model)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find radixkv engine tests -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each set of extras: pip runs again only when what is wanted has changed. The constraints matter beyond
# repeatability: an unpinned torch may bring gigabytes of CUDA libraries.
$(VENV)/ready-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing radixkv[$*] into $(VENV): a minute or a few, the first time"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found."; exit 1; }
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) \
	or sys.exit('Python 3.11 or newer is needed; $(PYTHON) is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
