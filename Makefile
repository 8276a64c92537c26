# Two commands on a fresh machine with Python 3.11 and venv: `make demo` and `make test`. Each makes .venv and installs
# what it needs, once; a change of pyproject.toml or constraints.txt installs again.
PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt

# Two workers on two cores: more threads inside of each only get in each other's way.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# No look at the network for a newer version, no advertisement in the log.
QUIET_ENV := PYRIGHT_PYTHON_IGNORE_WARNINGS=1 NO_MKDOCS_2_WARNING=1 PYTHONPATH=

.PHONY: help demo test lint format types tests docs families constraints clean
.DEFAULT_GOAL := help

help: ## say what each target does
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-demo ## train three arms of SmallGPT, try them under noise, write the report
	$(BIN)/support-tokens demo $(DEMO_ARGS)

test: lint types tests docs ## everything that must hold: lint, types, tests, doctests, strict site

lint: $(VENV)/.ready-dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.ready-dev ## ruff: repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.ready-dev ## pyright on src
	$(QUIET_ENV) $(BIN)/pyright

tests: $(VENV)/.ready-dev ## tests and doctests
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses $(JOBS)

families: $(VENV)/.ready-dev ## compare every causal type of transformers with autograd (FAMILIES=--fresh: from nothing)
	$(TEST_ENV) PYTHONPATH=experiments $(BIN)/python -m families.run $(FAMILIES)

docs: $(VENV)/.ready-dev ## strict build of the site into site/
	$(QUIET_ENV) $(BIN)/mkdocs build --strict --quiet

# Pin with the oldest Python that is meant to work: Debian 12 has 3.11.2, and some newest releases want a later 3.11.
constraints: $(VENV)/.ready-dev ## pin what .venv holds (a build tag such as +cpu is left to the index)
	$(BIN)/python -m pip freeze --exclude-editable --all \
	  | sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*/\1/p' | grep -viE '^(nvidia|cuda|triton|setuptools)' > constraints.new
	mv constraints.new constraints.txt

clean: ## remove what make made
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis

# A half-made environment is made good: venv and pip may run again over what is there.
$(VENV)/.ready-demo: $(SOURCES)
	@$(MAKE) --no-print-directory python
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.ready-dev: $(SOURCES)
	@$(MAKE) --no-print-directory python
	$(PIP) --editable '.[all]' --group dev --group docs
	@touch $(VENV)/.ready-demo $@

.PHONY: python
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "support-tokens needs Python 3.11 or newer; $(PYTHON) is older or missing: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
