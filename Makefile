# Two commands on a bare machine with Python 3.10 or newer: make quickstart, make test.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
PART ?= all
# What is installed on a machine with PyTorch, transformers, tiktoken, pytest and hypothesis but no
# package index, besides: `make wheels` where there is an index, then carry .wheels there.
CARRIED := tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0

.PHONY: setup quickstart test coverage torture bench gpu wheels clean

setup:
	@if [ .venv/requirements -nt requirements.txt ]; then echo "setup: .venv is there and up to date"; else $(MAKE) -s .venv/requirements; fi

.venv/requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12")'
	@echo "setup: installing requirements.txt into .venv (a minute or two, about 1 GB; more with CUDA)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/requirements-dev: requirements-dev.txt .venv/requirements
	@echo "setup: adding the test tools of requirements-dev.txt"
	@$(PIP) -r requirements-dev.txt
	@touch $@

quickstart: setup
	@$(PY) fineweb.py --source stdlib --data-dir data/stdlib
	@$(PY) train_gpt2.py --preset quickstart --overwrite

test: .venv/requirements-dev
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy *.py support
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

# Which branches of the scripts the tests take, in all processes. TESTS=tests/test_sample.py: of some.
TESTS ?= tests
coverage: .venv/requirements-dev
	@$(PY) -m coverage erase
	@OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest -n 2 $(TESTS)
	@$(PY) -m coverage combine -q
	@$(PY) -m coverage report $(if $(filter tests,$(TESTS)),--fail-under=90)

.venv/requirements-torture: requirements-torture.txt .venv/requirements-dev
	@echo "setup: adding lm-evaluation-harness of requirements-torture.txt"
	@$(PIP) -r requirements-torture.txt
	@touch $@

torture: .venv/requirements-torture
	@$(PY) -m pytest -m torture --timeout 7200

bench: setup
	@$(PY) bench.py

# the first hour on a GPU, or one PART of it: tests ladder batch paths scaling training
gpu: PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu:
	@test ! -d .wheels || $(PY) -m pip install -q --no-index --no-deps --upgrade --target .wheels/installed .wheels/*.whl
	@PYTHONPATH=.wheels/installed:$$PYTHONPATH $(PY) benchmarks/first_hour.py --part $(PART)

wheels:
	@$(PYTHON) -m pip download -q --no-deps --only-binary=:all: -d .wheels $(CARRIED)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis __pycache__ */__pycache__
