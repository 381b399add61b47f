"""What the tests share: a small corpus, a tiny model, and ways to run the scripts."""

import atexit
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import AREAS, OUTCOMES
from hypothesis import HealthCheck, settings
from warm import Done, Warm, two_ranks

from config import Settled, parse_command_line
from model import GPT, GPTConfig
from support.machine.distributed import World
from support.run.resume import find_checkpoint
from support.text.token_files import open_data

settings.register_profile(
    "here",
    derandomize=True,  # the same examples in every run
    max_examples=50,
    deadline=None,  # a slow machine is no error
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("here")
torch.set_num_threads(1)  # as many as the processes that tests start have
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if pytest was started by nohup

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
EOT = 50256  # GPT-2's <|endoftext|>
LONGEST = 900  # seconds that a script may take: many times what any needs, even on a busy machine

# what a clone without Git LFS leaves in the place of a file
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"

# a training run of a second or two: tiny model, float32, eager, nothing on the way
TINY = shlex.split("""
    --n-layer 2 --n-head 2 --n-embd 16 --sequence-length 16 --batch-size 2
    --total-batch-size 64 --max-steps 6 --warmup-steps 2 --learning-rate 0.01
    --val-every 0 --hellaswag-every 0 --sample-every 0 --checkpoint-every 0
    --dtype float32 --no-compile --device cpu
""")


def code_files() -> list[Path]:
    """All Python files but those of the tests."""
    folders = (ROOT / "support", ROOT / "benchmarks")
    return [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]


# -- data


def write_shard(path: Path, tokens) -> np.ndarray:
    tokens = np.asarray(tokens, np.uint16)
    np.save(path, tokens)
    return tokens


def documents(num_tokens: int, seed: int, vocab: int = 300) -> np.ndarray:
    """Random documents of 1 to 40 tokens, with some structure to learn."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, num_tokens) // rng.integers(1, 30, num_tokens)
    tokens[np.cumsum(rng.integers(1, 40, num_tokens)) % num_tokens] = EOT
    tokens[0] = EOT
    return tokens.astype(np.uint16)


def write_shards(directory: Path) -> Path:
    """Makes a validation shard and three training shards of different lengths."""
    directory.mkdir()
    write_shard(directory / "toy_val_000000.npy", documents(700, seed=0))
    for i, n in enumerate((1000, 333, 777), start=1):
        write_shard(directory / f"toy_train_{i:06d}.npy", documents(n, seed=i))
    return directory


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "shards")


# -- models


@pytest.fixture
def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))


def random_model(**shape) -> GPT:
    """A tiny model whose biases and layer norms are random, too: none is 0 or 1."""
    torch.manual_seed(1)
    small = dict(block_size=24, n_layer=2, n_head=2, n_embd=16)
    model = GPT(GPTConfig(**(small | shape)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = model.config.vocab_size if name == "transformer.wte.weight" else len(p)
            p[:rows] += 0.1 * torch.randn_like(p[:rows])
    return model


# -- scripts


def torchrun_variables(rank: int, size: int, local_size: int) -> dict[str, str]:
    """What torchrun gives a process of the first node."""
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=local_size)
    where = dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    return where | {name: str(number) for name, number in numbers.items()}


def environment(**extra) -> dict:
    """The environment without torchrun's variables, and with one thread for each test."""
    inherited = dict(os.environ)
    # the second has what tests/gpu.sh installed
    path = filter(None, (str(ROOT), inherited.get("PYTHONPATH")))
    inherited["PYTHONPATH"] = os.pathsep.join(path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        inherited.pop(name, None)
    return {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **extra}


def command(script: str, *args, ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / script), *map(str, args)]


def run_program(
    arguments: list[str], cwd: Path | None = None, **extra
) -> subprocess.CompletedProcess:
    """Runs a program to its end. `extra` are variables of its environment."""
    return subprocess.run(
        arguments,
        cwd=cwd or ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


def run_script(
    script: str, *args, ranks: int = 1, cwd: Path | None = None, expect: int = 0, **extra
) -> subprocess.CompletedProcess:
    """Runs a script. Fails, with what it printed, if its exit code is not the expected one."""
    done = run_program(command(script, *args, ranks=ranks), cwd, **extra)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen]:
    """A process that runs beside the test. It ends with the test at the latest."""
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Waits until the process has made a file or directory. Fails if the process ends before."""
    while not path.exists():
        time.sleep(0.01)
        assert process.poll() is None, process.communicate()


def wait_for_file(path: Path) -> None:
    """Waits until somebody has made a file or directory. Fails if it takes too long."""
    end = time.monotonic() + LONGEST / 3
    while not path.exists():
        time.sleep(0.01)
        assert time.monotonic() < end, f"{path} does not come"


@cache
def warm_server() -> Warm:
    """One for all tests of this process. It starts when the first of them needs it."""
    server = Warm().__enter__()
    atexit.register(server.__exit__)
    return server


# -- training


def tiny_run(shards: Path, log_dir: Path, flags: str = "", *more) -> list:
    """The arguments of a tiny training run. `flags` is split as a shell does."""
    return [*TINY, "--data-dir", shards, "--log-dir", log_dir, *shlex.split(flags), *more]


def train(
    shards: Path, log_dir: Path, flags: str = "", *more, ranks: int = 1, expect: int = 0, **how
) -> subprocess.CompletedProcess | Done:
    """Runs train_gpt2.py in forks of a warm process: one, or two as torchrun starts them.

    With more ranks, or with variables of the environment, it starts as a user starts it. So it does
    on a GPU: the warm process imports inductor, which asks whether CUDA is there, and after that
    question no fork can use CUDA.
    """
    args = tiny_run(shards, log_dir, flags, *more)
    if how or ranks > 2 or "--device cuda" in flags:
        return run_script("train_gpt2.py", *args, ranks=ranks, expect=expect, **how)
    as_torchrun = two_ranks() if ranks == 2 else {}
    done = warm_server().run("train_gpt2.py", *args, **as_torchrun)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def settle_in(world: World, args: list[str]) -> Settled:
    """What `settle` makes of the arguments, among processes that have met already."""
    config = parse_command_line(args)
    data = open_data(config.data_dir, "train", *(["val"] if config.val_every else []))
    return Settled(config, world, data, find_checkpoint(config, world))


EVERY_TWO = ("--checkpoint-every", 2, "--keep-checkpoints", 9)


def warm_train(shards: Path, log_dir: Path, *flags, **options) -> Done:
    """Runs train_gpt2.py in a fork, to any end. `options` are Warm.start's."""
    return warm_server().run("train_gpt2.py", *tiny_run(shards, log_dir, "", *flags), **options)


def read_records(log_dir: Path, kind: str | None = None) -> list[dict]:
    """The lines of metrics.jsonl, or those of one type: run, train, val, samples, ..."""
    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if kind in (None, record["type"])]


def losses(log_dir: Path) -> list[float]:
    """The training loss of each step. Fails if a step is missing or there twice."""
    records = read_records(log_dir, "train")
    assert [r["step"] for r in records] == list(range(len(records)))
    return [r["loss"] for r in records]


def weights_hash(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


# -- faults: a finished run to spoil, and the count of what cases ended in


@pytest.fixture(scope="session")
def warm() -> Warm:
    return warm_server()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus") / "shards")


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory) -> Path:
    """The log_dir of a run of 6 updates with checkpoints at 2, 4 and 6. Do not change it."""
    log_dir = tmp_path_factory.mktemp("finished") / "log"
    done = warm_train(corpus, log_dir, *EVERY_TWO)
    assert done.returncode == 0, done.stderr
    return log_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "log")


class HerePool:
    """Stands in for a pool of processes: does the work at once, in this one."""

    def __init__(self, workers, prepare, *arguments):
        prepare(*arguments)

    def submit(self, work, *args) -> Future:
        future: Future = Future()
        future.set_result(work(*args))
        return future


@pytest.fixture
def outcome(request) -> Callable[[str, str, str], None]:
    """outcome(area, case, what it ended in) counts a case that has ended as it should."""

    def count(area: str, case: str, ended: str) -> None:
        assert area in AREAS and ended in OUTCOMES.values()
        request.node.user_properties.append(("fault", (area, case, ended)))

    return count


def pytest_addoption(parser) -> None:
    table = "at the end, print what the cases of each area of faults ended in"
    parser.addoption("--fault-table", action="store_true", help=table)


def pytest_terminal_summary(terminalreporter, config) -> None:
    if config.getoption("--fault-table"):
        reports = [r for rs in terminalreporter.stats.values() for r in rs]
        found = [r.user_properties for r in reports if getattr(r, "when", "") == "call"]
        cases = [value for properties in found for name, value in properties if name == "fault"]
        terminalreporter.write_line(fault_table(cases))


def fault_table(cases: list[tuple[str, str, str]]) -> str:
    """How many (area, case, outcome) of each area had which outcome, as Markdown.

    A case whose test fails is not in the table: pytest reports it.
    """
    counts = Counter((area, ended) for area, _, ended in cases)
    rows = [[area, *(counts[area, ended] for ended in OUTCOMES.values())] for area in AREAS]
    rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    lines = [
        "| " + " | ".join(map(str, row)) + " |" for row in [["area", *OUTCOMES.values()], *rows]
    ]
    return "\n".join([lines[0], "|---" * (1 + len(OUTCOMES)) + "|", *lines[1:]])
