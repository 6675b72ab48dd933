# Everything happens in .venv, which the first target that needs it creates.
#   PYTHON  the interpreter to start from (3.11 or newer)
#   TORCH   the torch to install; for another build see README, "Installing"
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/without-torch
ROBOSUITE := $(VENV)/robosuite
INSTALL := -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.PHONY: help docs demo example-robosuite test test-core check clean

help:
	@echo "make demo       a server, a robot and a tiny random checkpoint; pictures land in demo-output/"
	@echo "make example-robosuite  a Panda in robosuite drives a server; needs OpenGL, a C compiler, 1.3 GB"
	@echo "make test       all tests"
	@echo "make test-core  the cache core's tests, where torch is not installed"
	@echo "make check      ruff, mypy --strict, layering"
	@echo "make docs       the documents as a site, in build/site"
	@echo "make clean      remove .venv, caches and outputs"

demo: $(VENV)/.run
	@$(BIN)/worldkv demo

example-robosuite: $(ROBOSUITE)/.installed
	@$(ROBOSUITE)/bin/python examples/robosuite_panda.py --output demo-output/robosuite_panda.mp4

test: test-core $(VENV)/.test
	@echo "== all tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-core: $(CORE)/.installed
	@echo "== the cache core, without torch"
	@$(CORE)/bin/python -c "import importlib.util as u; assert not u.find_spec('torch'), 'torch is installed here'"
	@$(CORE)/bin/python -m pytest tests/kv

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

docs: $(VENV)/.run
	@$(BIN)/python $(INSTALL) -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output replay-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find worldkv tests docs -name __pycache__ -prune -exec rm -rf {} +

# Stamps: each step runs once, and again when pyproject.toml changes.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "worldkv needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo "== installing $(TORCH) (once; the largest download)"
	@$(BIN)/python $(INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@echo "== installing worldkv and what it runs on (once)"
	@$(BIN)/python $(INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "== installing what the tests need (once)"
	@$(BIN)/python $(INSTALL) -e '.[all,sim,test]'
	@$(BIN)/python $(INSTALL) --no-deps openpi-client==0.1.2
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "== installing ruff and mypy (once)"
	@$(BIN)/python $(INSTALL) -e '.[all,sim,test,check]'
	@touch $@

$(CORE)/.installed: $(VENV)/.created
	@echo "== creating $(CORE) with numpy, pytest and hypothesis only (once)"
	@$(PYTHON) -m venv $(CORE)
	@$(CORE)/bin/python $(INSTALL) 'numpy>=1.26' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
	@touch $@

# On top of .venv, whose packages it sees; what robosuite pins (an older mujoco, numpy < 2) stays in here.
$(ROBOSUITE)/.installed: $(VENV)/.run pyproject.toml
	@echo "== creating $(ROBOSUITE) and installing robosuite there (once)"
	@$(BIN)/python -m venv $(ROBOSUITE)
	@$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" > \
	    $$($(ROBOSUITE)/bin/python -c "import site; print(site.getsitepackages()[0])")/on-top-of.pth
	@$(ROBOSUITE)/bin/python $(INSTALL) -e '.[robosuite]'
	@touch $@
