"""Where a run's values go besides its own files: TensorBoard, wandb, trackio, or nowhere."""

import importlib
import json
from pathlib import Path


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
