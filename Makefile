# Two commands on a bare machine with Python 3.10 or newer: make quickstart, make test.
# FLAGS="--device cpu" adds to the flags of the quickstart's training.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
# What is installed on a machine with PyTorch, transformers, tiktoken, pytest and hypothesis but no
# package index, besides: `make wheels` where there is an index, then carry .wheels there.
CARRIED := tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0

.PHONY: setup quickstart test coverage torture bench paper wheels clean
.PHONY: gpu gpu-tests gpu-run gpu-climb gpu-speed gpu-large

setup:
	@if [ .venv/requirements -nt requirements.txt ]; then echo "setup: .venv is there and up to date"; else $(MAKE) -s .venv/requirements; fi

.venv/requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12")'
	@echo "setup: installing requirements.txt into .venv (a minute or two, 1.5 GB; more with CUDA)"
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@touch $@

.venv/requirements-dev: requirements-dev.txt .venv/requirements
	@echo "setup: adding the test tools of requirements-dev.txt"
	@$(PIP) -r requirements-dev.txt
	@touch $@

quickstart: setup
	@$(PY) fineweb.py --source tinyshakespeare --vocab-size 1024 --data-dir data/tinyshakespeare
	@$(PY) train_gpt2.py --preset quickstart --resume auto $(FLAGS)

test: .venv/requirements-dev
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy .
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

# What only a GPU can show, without a network, in five parts of at most nine minutes, because rented
# GPUs often give ten a command. Each leaves OUT/PART.tar.gz, by default in benchmarks/DEVICE
# (tests/gpu.sh). A step is `step SECONDS NAME COMMAND`; after SECONDS it has 5 more to end. A part
# has 15 to begin and 15 to spare: SECONDS + 5 of its steps add up to 510 at most (tests/test_gpu.py).
# HELLASWAG=FILE.jsonl: examples to score. CPU=1: small sizes on the CPU, to try a part out.
GPU_PARTS := gpu-tests gpu-run gpu-climb gpu-speed gpu-large
$(GPU_PARTS): SHELL := bash
$(GPU_PARTS): export PART = $@
$(GPU_PARTS): export PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu-tests: $(if $(wildcard .venv/bin/python),.venv/requirements-dev)
gpu-run gpu-large: TRAIN = $(PY) train_gpt2.py --data-dir data/stdlib --val-every 0 --hellaswag-every 0 --sample-every 0 --total-batch-size 65536
gpu-run gpu-large: SMALL := $(if $(CPU),--device cpu --no-compile --n-layer 2 --n-head 2 --n-embd 64 --sequence-length 32 --total-batch-size 256 --val-tokens 2048 --num-samples 1)
gpu-run: SCORE := $(if $(HELLASWAG),--hellaswag-every 10 --hellaswag-limit $(if $(CPU),20,1000) --hellaswag-path "$(HELLASWAG)")
gpu-run: CUT = $(TRAIN) --max-steps 20 --checkpoint-every 10 --deterministic $(SMALL)
gpu-run gpu-climb gpu-speed: SIZE := $(if $(CPU),--device cpu --no-compile --model tiny --sequence-length 32 --batch-size 2 --max-batch 2 --rounds 1)

gpu:
	@$(MAKE) -k -j1 --no-print-directory $(GPU_PARTS)

gpu-tests:
	@. tests/gpu.sh; \
	step 200 one_process $(PY) -m pytest -vv -n 2 -p no:cacheprovider -k cuda tests/test_one_process.py; \
	step 290 cuda $(PY) -m pytest -vv -n 2 -p no:cacheprovider tests/test_cuda.py; \
	finish

gpu-run:
	@. tests/gpu.sh; \
	step 40 data $(PY) fineweb.py --source stdlib --data-dir data/stdlib; \
	$(if $(HELLASWAG),,echo "no HellaSwag: name its file by HELLASWAG=FILE.jsonl" | tee $$left/hellaswag.log;) \
	step 150 training $(TRAIN) --max-steps 30 --val-every 10 --val-tokens 262144 --sample-every 10 $(SCORE) $(SMALL) --log-dir $$left/training; \
	step 60 kernels $(PY) tests/profile_step.py --batch-size 64 $(SIZE); \
	step 75 whole $(CUT) --log-dir $$left/whole; \
	KILL_AT=$$left/cut/ckpt_000010 step 60 cut $(CUT) --log-dir $$left/cut; \
	step 60 resumed $(CUT) --log-dir $$left/cut --resume auto; \
	step 5 same_losses cmp $$left/whole/log.txt $$left/cut/log.txt; \
	step 5 same_weights cmp $$left/whole/ckpt_000020/model.safetensors $$left/cut/ckpt_000020/model.safetensors; \
	finish

gpu-climb:
	@. tests/gpu.sh; \
	step 505 ladder $(PY) bench.py --out $$left/ladder $(SIZE); \
	finish

gpu-speed:
	@. tests/gpu.sh; \
	step 230 against $(PY) bench.py --out $$left/against --against hf $(SIZE); \
	step 270 pieces $(PY) bench.py --out $$left/pieces --pieces $(SIZE); \
	finish

# Which micro-batch is found for the XL, and do the updates fit, too?
gpu-large:
	@. tests/gpu.sh; \
	step 40 data $(PY) fineweb.py --source stdlib --data-dir data/stdlib; \
	step 200 xl_checkpointing $(TRAIN) --preset gpt2-xl --max-steps 10 --checkpoint-every 0 --activation-checkpointing $(SMALL) --log-dir $$left/xl_checkpointing; \
	step 240 xl $(TRAIN) --preset gpt2-xl --max-steps 5 --checkpoint-every 0 $(SMALL) --log-dir $$left/xl; \
	finish

# What a GPU would run, compiled and accounted for without one: see docs/gpu.md. It has an
# environment of its own, because `.venv` must stay without triton.
.venv-paper/requirements: requirements-paper.txt requirements.txt
	@echo "paper: installing requirements-paper.txt into .venv-paper (a minute or two, about 2 GB)"
	@.venv-paper/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv-paper
	@.venv-paper/bin/python -m pip install -qq --disable-pip-version-check -r requirements-paper.txt || { echo "not run: triton or PyTorch cannot be installed"; exit 3; }
	@touch $@

paper: .venv-paper/requirements
	@.venv-paper/bin/python tests/paper/paper.py

wheels:
	@$(PYTHON) -m pip download -q --no-deps --only-binary=:all: -d .wheels $(CARRIED)

clean:
	rm -rf .venv .venv-paper .pytest_cache .ruff_cache .mypy_cache .hypothesis __pycache__ */__pycache__ support/*/__pycache__
