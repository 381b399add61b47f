"""What a run writes down (log.txt, metrics.jsonl, a tracker), and how it is read back."""

import importlib
import json
import math
import os
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np

from support.common import UserError, say, sync, write_whole

# The streams of log.txt: which value of a record, and its digits
STREAMS = {"train": ("loss", 6), "val": ("val_loss", 4), "hella": ("hellaswag", 4)}


class Log:
    """The console, log.txt, metrics.jsonl and a tracker; silent off rank 0.

    log.txt has `{step} {stream} {value}`, as in build-nanogpt. `start` or `resume` first, then
    `record` and `say`, then `close`.
    """

    def __init__(self, log_dir: str | Path, is_main: bool, tracker: str = "none"):
        self.dir = Path(log_dir)
        self.is_main = is_main
        self.text = self.dir / "log.txt"
        self.metrics = self.dir / "metrics.jsonl"
        self.tracker_name = tracker
        self.tracker = Tracker()

    def start(self, run: dict) -> None:
        """Begins a new run: the first line of metrics.jsonl says what it is."""
        if self.is_main:
            self.write([{"type": "run", **run}])
            self.tracker = open_tracker(self.tracker_name, self.dir, run, step=0)

    def resume(self, step: int, evaluated: bool, run: dict, ours: bool = True) -> None:
        """Cuts both files back to a checkpoint's step and goes on from there.

        So no step appears twice. evaluated: whether the evaluations of that very step were done
        before the checkpoint. ours: whether what the files hold is of the same run.
        """

        def stays(record: dict) -> bool:
            if record["type"] == "run" or record["step"] < step:
                return True
            if record["step"] > step or record["type"] in ("train", "end"):
                return False
            return evaluated or record["type"] == "resume"

        if self.is_main:
            records = [record for record in self.read_back() if ours and stays(record)]
            self.write([*records, {"type": "resume", "step": step, **run}])
            self.tracker = open_tracker(self.tracker_name, self.dir, run, step)

    def read_back(self) -> list[dict]:
        """The records so far. A file with lines that are none is kept beside, and said so."""
        if not self.metrics.exists():
            return []
        content = self.metrics.read_bytes()
        records = read_metrics(self.metrics)
        whole_lines = content.count(b"\n")  # what a kill left half-written has no end
        if len(records) < whole_lines:
            aside = self.metrics.with_name(f"damaged_{self.metrics.name}")
            write_whole(aside, content)
            lost = whole_lines - len(records)
            self.say(f"{self.metrics}: {lost} lines are no records; the file is kept as {aside}")
        return records

    def write(self, records: list[dict]) -> None:
        """Makes both files anew, each whole or not at all."""
        lines = [json.dumps(record) for record in records]
        text = [line for record in records if (line := line_of(record))]
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            write_whole(self.metrics, as_bytes(lines))
            write_whole(self.text, as_bytes(text))
        except OSError as error:
            raise cannot_be_written(self.metrics, error) from None

    def record(self, step: int, type: str, **values) -> None:
        """One line in metrics.jsonl and, of training, validation and HellaSwag, in log.txt."""
        if not self.is_main:
            return
        record = {"type": type, "step": step, **values}
        append(self.metrics, json.dumps(record))
        if line := line_of(record):
            append(self.text, line)
        self.tracker.log(step, {f"{type}/{name}": value for name, value in values.items()})

    def sync(self) -> None:
        """Waits until all that is recorded is on the disk."""
        if self.is_main:
            sync(self.text)
            sync(self.metrics)

    def say(self, message: str = "") -> None:
        """Prints on rank 0."""
        if self.is_main:
            say(message)

    def close(self) -> None:
        self.tracker.close()


@contextmanager
def alone_in(log_dir: str | Path, world, patience: float):
    """Holds log_dir for this run: two that write into it would spoil both.

    Rank 0 of `world` holds the lock, which the system releases however the process ends. Raises
    UserError on every rank if another run still has it after `patience` seconds.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(Path(log_dir) / ".lock", timeout=patience)
    owner = Path(log_dir) / ".owner"
    problem = ""
    if world.is_main:
        try:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
            lock.acquire()
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            write_whole(owner, f"process {os.getpid()} of {socket.gethostname()}, {began}".encode())
        except Timeout:
            holder = ""
            with suppress(OSError):
                holder = f" ({owner.read_text()})"
            problem = (
                f"another run{holder} is writing to {log_dir}: "
                "wait for it or stop it, or choose another --log-dir"
            )
        except OSError as error:
            problem = f"{log_dir} cannot be written ({error.strerror}): choose another --log-dir"
        except NotImplementedError:
            say(f"{log_dir}: this file system has no locks: let no other run write here")
    world.raise_together(problem)
    try:
        yield
    finally:
        lock.release()


def line_of(record: dict) -> str:
    """What log.txt has of a record: nothing of samples and the like."""
    name, digits = STREAMS.get(record["type"], ("", 0))
    value = record.get(name)
    if not isinstance(value, (int, float)):
        return ""
    return f"{record['step']} {record['type']} {value:.{digits}f}"


def as_bytes(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def append(path: Path, line: str) -> None:
    try:
        with open(path, "ab") as file:
            file.write(as_bytes([line]))
    except OSError as error:
        raise cannot_be_written(path, error) from None


def cannot_be_written(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({error.strerror}): mend that, then go on with --resume auto"
    )


# -- trackers


class Tracker:
    """Where metrics go besides log_dir: nowhere, unless a subclass knows better."""

    def log(self, step: int, values: dict) -> None:
        """values: {type/name: number, text, list of texts, or None}"""

    def close(self) -> None:
        pass


class TensorBoard(Tracker):
    """Event files in log_dir/tensorboard."""

    def __init__(self, log_dir: Path, run: dict, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: what a resumed run makes again replaces what was there
        self.writer = SummaryWriter(log_dir / "tensorboard", purge_step=step)
        self.writer.add_text("run", f"```\n{json.dumps(run, indent=2)}\n```", step)

    def log(self, step: int, values: dict) -> None:
        for name, value in readable(values).items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            elif value is not None:
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Service(Tracker):
    """wandb or trackio, which share these three calls."""

    def __init__(self, name: str, log_dir: Path, run: dict):
        self.service = importlib.import_module(name)
        options = {"dir": str(log_dir)} if name == "wandb" else {}
        self.service.init(project="gpt2", name=log_dir.name, config=run["config"], **options)

    def log(self, step: int, values: dict) -> None:
        self.service.log(readable(values), step=step)

    def close(self) -> None:
        self.service.finish()


def open_tracker(name: str, log_dir: Path, run: dict, step: int) -> Tracker:
    """The tracker of that name, for a run that begins or goes on at step.

    name: none | tensorboard | wandb | trackio.
    """
    if name == "none":
        return Tracker()
    if name == "tensorboard":
        return TensorBoard(log_dir, run, step)
    return Service(name, log_dir, run)


def readable(values: dict) -> dict:
    """The same values with a list of samples as one text."""
    parted = "\n\n---\n\n"
    return {name: parted.join(v) if isinstance(v, list) else v for name, v in values.items()}


# -- reading back


@dataclass
class LoggedRun:
    """One run, as its directory tells it.

    streams: {train, val, hella: (steps, values)}. records: of metrics.jsonl, of which the first
    says what the run is; none where there was only a log.txt.
    """

    name: str
    streams: dict[str, tuple[list[int], list[float]]]
    records: list[dict]
    config: dict

    def series(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of a field of the training records (lr, norm, …).

        Both are empty if it was not logged.
        """
        rows = [r for r in self.records if r["type"] == "train" and r.get(field) is not None]
        return [row["step"] for row in rows], [row[field] for row in rows]

    def last_step(self) -> int:
        return max((steps[-1] for steps, _ in self.streams.values()), default=0)

    def place(self, steps: list[int], by: str) -> np.ndarray:
        """Where steps lie along `by`: step, tokens or time (in seconds).

        Not-a-number where the run does not say.
        """
        if by == "step":
            return np.array(steps, dtype=float)
        if by == "tokens":
            return np.array(steps) * self.config.get("total_batch_size", math.nan)
        done, wall = self.series("wall")
        if not done:
            return np.full(len(steps), math.nan)
        ends = [step + 1 for step in done]  # `wall` is the time at the end of update step + 1
        return np.interp(steps, [0, *ends], [0, *wall])


def read_log(path: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """log.txt (ours or build-nanogpt's) -> {stream: (steps, values)} for train, val and hella."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    for line in Path(path).read_text(errors="replace").splitlines():
        with suppress(ValueError):  # the last line of a run in progress may be half-written
            step, stream, value = line.split()
            step_number = int(step)
            loss = float(value)
            steps, values = streams.setdefault(stream, ([], []))
            steps.append(step_number)
            values.append(loss)
    return streams


def read_metrics(path: str | Path) -> list[dict]:
    """metrics.jsonl -> its records, without lines that are none (a power cut leaves such)."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError, RecursionError):
            record = json.loads(line)
            if is_record(record):
                records.append(record)
    return records


def is_record(record) -> bool:
    """Whether it is of a type and, unless it is the first one, of a step."""
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        return False
    if not isinstance(record.get("config", {}), dict):
        return False
    return record["type"] == "run" or isinstance(record.get("step"), int)


def read_run(directory: str | Path, **config) -> LoggedRun:
    """A run's directory. One with a log.txt alone (build-nanogpt's) can be told what it is:

    read_run("build-nanogpt/log", data_dir="edu_fineweb10B", total_batch_size=524288, n_layer=12)
    """
    directory = Path(directory)
    metrics = directory / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    known = {}
    for record in records:
        if record["type"] in ("run", "resume"):
            known = record.get("config", {}) | record.get(
                "model", {}
            )  # --init-from has sizes of its own
            break
    return LoggedRun(directory.name, read_log(directory / "log.txt"), records, known | config)


def read_runs(*patterns: str) -> list[LoggedRun]:
    """The runs in all directories that match: read_runs("runs/*", "log/quickstart").

    Raises FileNotFoundError for none.
    """
    paths = [path for pattern in patterns for path in sorted(glob(pattern))]
    found = [path for path in paths if (Path(path) / "log.txt").exists()]
    if not found:
        raise FileNotFoundError(
            f"no run in {' or '.join(patterns)}: make quickstart leaves one in log/quickstart"
        )
    return [read_run(path) for path in found]
