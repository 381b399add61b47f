"""What a run has written down, read back: log.txt and metrics.jsonl, ours and others'."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np

RECENT = 10  # of the last training losses are told as one mean: a single one is noise
# The streams of log.txt: which value of a record, and its digits
STREAMS = {"train": ("loss", 6), "val": ("val_loss", 4), "hella": ("hellaswag", 4)}


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


def starts_of(records: list[dict]) -> list[dict]:
    """The records with which a run began and was resumed."""
    return [record for record in records if record["type"] in ("run", "resume")]


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
    starts = starts_of(records)
    if starts:  # --init-from has sizes of its own
        known = starts[0].get("config", {}) | starts[0].get("model", {})
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
