# Everything happens in .venv, which the first target that needs it creates.
#   PYTHON  the interpreter to start from (3.11 or newer)
#   TORCH   the torch to install; for another build see README, "Installing"
#   TORCH_OLDEST  the torch beside the lowest versions of everything else
#   PYTHON_OLD  where the client is tested: the oldest Python from 3.9 on that is found here
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_OLDEST ?= $(TORCH)

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/without-torch
CLIENT := $(VENV)/client-alone
ROBOSUITE := $(VENV)/robosuite
OLDEST := $(VENV)/oldest-packages
INSTALL := -m pip --disable-pip-version-check install -qq
CLIENT_SOURCES := client/pyproject.toml $(wildcard client/worldkv_client/*.py client/worldkv_client/*/*.py)

# Less than half a minute on two cores.
QUICK := tests/test_layering.py tests/kv tests/attention tests/engine/test_scheduler.py tests/models/test_unipc.py \
    tests/models/test_step_skipping.py tests/robots/test_transforms.py tests/robots/test_embodiment_file.py \
    tests/robots/test_observation.py client/tests/test_wire.py

# What meets the packages that worldkv runs on: wire, client, server, checkpoints, commands. Minutes on two cores.
OLDEST_EXTRAS := dreamzero server video plots cli lerobot otel test
OLDEST_TESTS := client/tests tests/test_client.py tests/server tests/models/test_checkpoint.py \
    tests/models/test_random_checkpoint.py tests/models/test_tokenizer.py tests/cli/test_main.py tests/cli/test_serve.py \
    tests/cli/test_inspect.py tests/cli/test_replay.py tests/cli/test_video.py tests/cli/test_plots.py \
    tests/robots/test_recorder.py
OLDEST_WARNINGS := -W "ignore:'enablePackrat' deprecated:DeprecationWarning"  # old matplotlib on new pyparsing

# One that cannot start, or makes no environments, is passed over.
OLD_PYTHONS := python3.9 $(wildcard $(HOME)/.pyenv/versions/3.9.*/bin/python) pypy3 python3.10 $(PYTHON)
IS_USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 9))
PYTHON_OLD ?= $(shell for python in $(OLD_PYTHONS); do \
    $$python -c '$(IS_USABLE)' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help docs demo example-robosuite quick test test-client test-core test-oldest check clean

help:
	@echo "make demo       a server, a robot and a tiny random checkpoint; pictures land in demo-output/"
	@echo "make example-robosuite  a Panda in robosuite drives a server; needs OpenGL, a C compiler, 1.3 GB"
	@echo "make quick      linters and the fast tests: half a minute"
	@echo "make test       all tests"
	@echo "make test-client  the client's tests alone, on the oldest Python that is here"
	@echo "make test-core  the cache core's tests, where torch is not installed"
	@echo "make test-oldest  what meets other packages, with the lowest versions of them that are allowed"
	@echo "make check      ruff, mypy --strict, layering"
	@echo "make docs       the documents as a site, in build/site"
	@echo "make clean      remove .venv, caches and outputs"

demo: $(VENV)/.run
	@$(BIN)/worldkv demo

example-robosuite: $(ROBOSUITE)/.installed
	@$(ROBOSUITE)/bin/python examples/robosuite_panda.py --output demo-output/robosuite_panda.mp4

test: test-core test-client $(VENV)/.test
	@echo "== all tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

quick: $(VENV)/.check
	@$(BIN)/ruff check -q .
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(QUICK)

test-core: $(CORE)/.installed
	@echo "== the cache core, without torch"
	@$(CORE)/bin/python -c "import importlib.util as u; assert not u.find_spec('torch'), 'torch is installed here'"
	@$(CORE)/bin/python -m pytest tests/kv

test-client: $(CLIENT)/.installed
	@echo "== the client alone, with $$($(CLIENT)/bin/python --version | tr '\n' ' ')"
	@$(CLIENT)/bin/python -c "import importlib.util as u; assert not u.find_spec('torch'), 'torch is installed here'"
	@$(CLIENT)/bin/pytest client/tests

test-oldest: $(OLDEST)/.installed
	@echo "== with the lowest versions that pyproject.toml allows"
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 $(OLDEST_WARNINGS) $(OLDEST_TESTS)

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

docs: $(VENV)/.run
	@$(BIN)/python $(INSTALL) -e ./client -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build client/build dist *.egg-info client/*.egg-info demo-output replay-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis client/.pytest_cache client/.hypothesis
	find worldkv client tests docs -name __pycache__ -prune -exec rm -rf {} +

# Stamps: each step runs once, and again when a pyproject.toml changes.

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

$(VENV)/.run: $(VENV)/.torch pyproject.toml client/pyproject.toml
	@echo "== installing worldkv and what it runs on (once)"
	@$(BIN)/python $(INSTALL) -e ./client -e '.[all]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "== installing what the tests need (once)"
	@$(BIN)/python $(INSTALL) -e ./client -e '.[all,sim,test,browser,docs]'
	@$(BIN)/python $(INSTALL) --no-deps openpi-client==0.1.2
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "== installing ruff and mypy (once)"
	@$(BIN)/python $(INSTALL) -e ./client -e '.[all,sim,test,browser,docs,check]'
	@touch $@

# The client without what it needs: its errors need nothing.
$(CORE)/.installed: $(VENV)/.created client/pyproject.toml
	@echo "== creating $(CORE) with numpy, pytest and hypothesis only (once)"
	@$(PYTHON) -m venv $(CORE)
	@$(CORE)/bin/python $(INSTALL) 'numpy>=1.26' 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
	@$(CORE)/bin/python $(INSTALL) --no-deps -e ./client
	@touch $@

# Not editable: as a robot's computer gets it, and again when a source changes.
$(CLIENT)/.installed: $(VENV)/.created $(CLIENT_SOURCES)
	@echo "== creating $(CLIENT) from $(PYTHON_OLD) with the client and what it needs"
	@$(PYTHON_OLD) -m venv --clear $(CLIENT)
	@rm -rf client/build
	@$(CLIENT)/bin/python $(INSTALL) './client[test]'
	@touch $@

# torch's lowest version is the one that the GPU tests run with; its wheel for a CPU is on few indexes.
$(OLDEST)/.installed: $(VENV)/.created pyproject.toml client/pyproject.toml tests/lowest_versions.py
	@echo "== creating $(OLDEST) with the lowest versions of what worldkv runs on (once)"
	@$(PYTHON) -m venv --clear $(OLDEST)
	@$(PYTHON) tests/lowest_versions.py $(OLDEST_EXTRAS) > $(OLDEST)/lowest.txt
	@$(OLDEST)/bin/python $(INSTALL) 'setuptools>=77' wheel "$(TORCH_OLDEST)"
	@$(OLDEST)/bin/python $(INSTALL) -r $(OLDEST)/lowest.txt
	@$(OLDEST)/bin/python $(INSTALL) --no-deps -e ./client -e .
	@touch $@

# On top of .venv, whose packages it sees; what robosuite pins (an older mujoco, numpy < 2) stays in here.
$(ROBOSUITE)/.installed: $(VENV)/.run pyproject.toml
	@echo "== creating $(ROBOSUITE) and installing robosuite there (once)"
	@$(BIN)/python -m venv $(ROBOSUITE)
	@$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" > \
	    $$($(ROBOSUITE)/bin/python -c "import site; print(site.getsitepackages()[0])")/on-top-of.pth
	@$(ROBOSUITE)/bin/python $(INSTALL) -e ./client -e '.[robosuite]'
	@touch $@
