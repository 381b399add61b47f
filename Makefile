# Two commands on a bare machine with Python 3.10 or newer: make quickstart, make test.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
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
	@.venv/bin/mypy *.py support benchmarks
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

# What only a GPU can show, without a network. Logs, tables and plots are left in benchmarks/DEVICE;
# a command that fails does not stop the next, and one that is out of time keeps the rows that it has.
# At the end a run is killed and resumed: the same bits?
gpu: PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu: SHORT := --data-dir data/stdlib --max-steps 20 --warmup-steps 5 --val-every 20 --val-tokens 262144 --hellaswag-every 0 --sample-every 0 --checkpoint-every 10
gpu: EXAMPLES := $(firstword $(wildcard hellaswag/hellaswag_val.jsonl ../shared/data/hellaswag_val_1000.jsonl))
gpu:
	@test ! -d .wheels || $(PY) -m pip install -q --no-index --no-deps --upgrade --target .wheels/installed .wheels/*.whl
	@export PYTHONUNBUFFERED=1 PYTHONPATH=.wheels/installed:$$PYTHONPATH; \
	out=benchmarks/$$($(PY) -c 'import re, torch; print(re.sub(r"\W+", "-", torch.cuda.get_device_name()))') || { echo "make gpu: there is no GPU here"; exit 1; }; \
	run() { log=$$out/$$1.log; shift; echo "> $$*"; { timeout 15m "$$@" || echo "FAILED with $$?: $$*"; } 2>&1 | tee $$log; }; \
	bench() { name=$$1; shift; run $$name $(PY) bench.py --out $$out/$$name "$$@"; }; \
	rm -rf log/gpu; mkdir -p $$out log/gpu; \
	run tests $(PY) -m pytest -p no:cacheprovider tests/test_cuda.py; \
	bench sweep --sweep batch; bench ladder; \
	bench hellaswag --hellaswag --examples 200 --hellaswag-path="$(EXAMPLES)"; \
	bench against --against hf; bench generate --generate; bench scaling --scaling; \
	run data $(PY) fineweb.py --source stdlib --data-dir data/stdlib; \
	run training $(PY) train_gpt2.py $(SHORT) --log-dir log/gpu/free; cp log/gpu/free/loss.png $$out/training.png; \
	run whole $(PY) train_gpt2.py $(SHORT) --deterministic --log-dir log/gpu/whole; \
	$(PY) train_gpt2.py $(SHORT) --deterministic --log-dir log/gpu/cut > $$out/cut.log 2>&1 & pid=$$!; \
	while kill -0 $$pid 2> /dev/null && ! test -d log/gpu/cut/ckpt_000010; do sleep 0.1; done; kill -9 $$pid; wait $$pid; \
	run resumed $(PY) train_gpt2.py $(SHORT) --deterministic --log-dir log/gpu/cut --resume auto; \
	run same_losses cmp log/gpu/whole/log.txt log/gpu/cut/log.txt; \
	run same_weights cmp log/gpu/whole/ckpt_000020/model.safetensors log/gpu/cut/ckpt_000020/model.safetensors; \
	! grep FAILED $$out/*.log

wheels:
	@$(PYTHON) -m pip download -q --no-deps --only-binary=:all: -d .wheels $(CARRIED)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis __pycache__ */__pycache__
