"""What a run writes down: log.txt, metrics.jsonl and a tracker. Reads the two files back, too."""

import importlib
import json
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import SimpleNamespace

from support.common import UserError, say, sync, write_whole

# The streams of log.txt: the field of a record that holds the value, and its digits
STREAMS = {"train": ("loss", 6), "val": ("val_loss", 4), "hella": ("hellaswag", 4)}
RECENT = 10  # reports average so many of the last training losses: a single loss is noise


class Log:
    """Writes to the console, log.txt, metrics.jsonl and a tracker, on rank 0 only.

    A line of log.txt is `{step} {stream} {value}`, as in build-nanogpt. Call `start` or `resume`
    first, then `record` and `say`, then `close`.
    """

    def __init__(self, log_dir: str | Path, is_main: bool, tracker: str = "none"):
        self.dir = Path(log_dir)
        self.is_main = is_main
        self.text = self.dir / "log.txt"
        self.metrics = self.dir / "metrics.jsonl"
        self.tracker_name = tracker
        self.tracker = None

    def start(self, run: dict) -> None:
        """Begins a new run. `run` becomes the first line of metrics.jsonl."""
        if self.is_main:
            self.begin([{"type": "run", **run}])

    def resume(self, step: int, evaluated: bool, run: dict, ours: bool = True) -> None:
        """Cuts both files back to a checkpoint's step, so that no step appears twice.

        evaluated: whether the run had evaluated this step before it saved the checkpoint.
        ours: whether the files belong to the run that is resumed.
        """
        if not self.is_main:
            return
        records = []
        if ours and self.metrics.exists():
            records = read_metrics(self.metrics)
            lost = self.metrics.read_bytes().count(b"\n") - len(records)
            if lost > 0:  # a kill only cuts the last line, which then has no end
                self.say(f"{self.metrics}: damaged lines left out: {lost}")
        done = step if evaluated else step - 1
        last = {"train": step - 1, "end": step - 1, "val": done, "hella": done, "samples": done}
        kept = [r for r in records if r.get("step", 0) <= last.get(r["type"], step)]
        self.begin([*kept, {"type": "resume", "step": step, **run}])

    def open_tracker(self, run: dict, step: int) -> None:
        self.tracker = open_tracker(self.tracker_name, self.dir, run, step)

    def begin(self, records: list[dict]) -> None:
        """Replaces both files."""
        with writing(self.dir):
            self.dir.mkdir(parents=True, exist_ok=True)
            write_whole(self.metrics, *[json.dumps(r).encode() + b"\n" for r in records])
            write_whole(self.text, "".join(map(line_of, records)).encode())

    def record(self, step: int, type: str, **values) -> None:
        """Adds a line to metrics.jsonl. log.txt gets the losses and the HellaSwag score."""
        if not self.is_main:
            return
        record = {"type": type, "step": step, **values}
        with writing(self.dir), open(self.metrics, "a") as metrics, open(self.text, "a") as text:
            metrics.write(json.dumps(record) + "\n")
            text.write(line_of(record))
        if type == "samples":
            values["samples"] = "\n\n---\n\n".join(values["samples"])
        if self.tracker:
            known = {f"{type}/{k}": v for k, v in values.items() if v is not None}
            self.tracker.log(known, step=step)

    def sync(self) -> None:
        """Waits until everything recorded is on the disk."""
        if self.is_main:
            with writing(self.dir):
                sync(self.text)
                sync(self.metrics)

    def say(self, message: str = "") -> None:
        """Prints on rank 0."""
        if self.is_main:
            say(message)

    def close(self) -> None:
        if self.tracker:
            self.tracker.finish()


@contextmanager
def alone_in(log_dir: str | Path, world, patience: float):
    """Locks log_dir, so that no second run spoils its files. Any end of the process unlocks it.

    Raises UserError on every rank if another run still holds the lock after `patience` seconds.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(Path(log_dir) / ".lock", timeout=patience)
    with world.together(), writing(Path(log_dir)):
        try:
            if world.is_main:
                lock.acquire()  # makes the directory, too
        except Timeout:
            what = f"another run is writing to {log_dir}"
            raise UserError(f"{what}: wait for it, or choose another --log-dir") from None
        except NotImplementedError:
            say(f"{log_dir}: this file system has no locks: let no other run write here")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(directory: Path):
    """Adds to an OSError what could not be written, and the way out."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or directory} cannot be written ({error.strerror})"
        raise UserError(f"{what}: solve that, then go on with --resume auto") from None


def line_of(record: dict) -> str:
    """A record's line of log.txt; empty for samples and the like."""
    name, digits = STREAMS.get(record["type"], ("", 0))
    value = record.get(name)
    return "" if value is None else f"{record['step']} {record['type']} {value:.{digits}f}\n"


# -- reading back


@dataclass
class LoggedRun:
    """A run, read from its directory. If that has only a log.txt, there are no records."""

    name: str
    streams: dict[str, tuple]  # train, val and hella: the steps and the values
    records: list[dict]  # the lines of metrics.jsonl
    config: dict

    def series(self, field: str, type: str = "train") -> tuple[list, list]:
        """Steps and values of a field (lr, norm, …) of a type of record, where it is known."""
        rows = [r for r in self.records if r["type"] == type and r.get(field) is not None]
        return [row["step"] for row in rows], [row[field] for row in rows]


def read_log(path: Path) -> dict[str, tuple]:
    """Reads log.txt, ours or build-nanogpt's."""
    streams: dict = {}
    line = re.compile(r"^(\d+) (\w+) (\d+\.\d+|nan|inf)\n", re.MULTILINE)
    for step, stream, value in line.findall(path.read_text(errors="replace")):
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def read_metrics(path: Path) -> list[dict]:
    """The records of metrics.jsonl. Skips damaged lines."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and "type" in record:
                records.append(record)
    return records


def starts_of(records: list[dict]) -> list[dict]:
    """The records of the run's start and of each resume."""
    return [record for record in records if record["type"] in ("run", "resume")]


def read_run(directory: str | Path, **config) -> LoggedRun:
    """Reads a run's directory. `config` describes a run that has only a log.txt:

    read_run("build-nanogpt/log", data_dir="edu_fineweb10B", total_batch_size=524288, n_layer=12)
    """
    directory = Path(directory)
    metrics = directory / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    first = records[0] if records else {}
    config = first.get("config", {}) | first.get("model", {}) | config  # --init-from has own sizes
    return LoggedRun(directory.name, read_log(directory / "log.txt"), records, config)


def read_runs(*patterns: str) -> list[LoggedRun]:
    """Reads the runs in all matching directories: read_runs("runs/*", "log/quickstart")."""
    logs = [Path(log) for pattern in patterns for log in sorted(glob(f"{pattern}/log.txt"))]
    if not logs:
        raise FileNotFoundError(f"no run in {patterns}: make quickstart makes log/quickstart")
    return [read_run(log.parent) for log in logs]


# -- trackers


def open_tracker(name: str, log_dir: Path, run: dict, step: int):
    """Returns None or something with wandb's `log(values, step=…)` and `finish()`."""
    if name == "none":
        return None
    if name != "tensorboard":
        service = importlib.import_module(name)
        service.init(project="gpt2", name=log_dir.name, config=run["config"] | run.get("model", {}))
        return service
    from torch.utils.tensorboard import SummaryWriter

    # purge_step: a resumed run replaces the steps that it repeats
    writer = SummaryWriter(log_dir / "tensorboard", purge_step=step)

    def log(values: dict, step: int) -> None:
        for name, value in values.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(name, value, step)

    return SimpleNamespace(log=log, finish=writer.close)
