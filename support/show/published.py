"""What others published about GPT-2, beside a run: OpenAI's scores, and the 124M's reproduction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.run.log import LoggedRun

ASSETS = Path(__file__).parents[2] / "assets"
OPENAI: dict = json.loads((ASSETS / "openai.json").read_text())
VOCAB_SIZE = OPENAI["vocab_size"]  # losses of other vocabularies are not compared with these
SIZE = dict(n_layer=12, n_embd=768, total_batch_size=524288)
REPRODUCTION = SIZE | dict(optimizer="adamw", max_steps=19073)


def text_of(config: dict[str, Any]) -> str:
    """The name of the text that a run trains on. Losses on different texts are not compared."""
    return Path(config.get("data_dir", "?")).name


def size_of(config: dict[str, Any]) -> str:
    """OpenAI's name for a model of this size, "" if there is none."""
    return OPENAI["sizes"].get(f"{config.get('n_layer', 12)} x {config.get('n_embd', 768)}", "")


def predicts_as_gpt2(config: dict[str, Any], vocab_size: int = VOCAB_SIZE) -> bool:
    """Whether losses are of GPT-2's vocabulary and context length, as all published ones here."""
    tokens = config.get("vocab_size", vocab_size)
    return (tokens, config.get("sequence_length", 1024)) == (VOCAB_SIZE, 1024)


def is_reproduction(config: dict[str, Any], vocab_size: int = VOCAB_SIZE) -> bool:
    """Whether a run is the 124M's on FineWeb-Edu, of which others have published logs."""
    shape = {name: config.get(name) for name in REPRODUCTION}
    is_new = config.get("init_from", "scratch") == "scratch"
    is_text = text_of(config) in ("edu_fineweb10B", "fineweb-edu-10B")
    return shape == REPRODUCTION and is_new and is_text and predicts_as_gpt2(config, vocab_size)


def openai_loss(config: dict[str, Any]) -> float | None:
    """The validation loss of OpenAI's model of a run's size on its text, where it is known."""
    if not predicts_as_gpt2(config):
        return None
    return OPENAI["val_loss"].get(text_of(config), {}).get(size_of(config))


def is_scored(run: LoggedRun) -> bool:
    """Whether it was scored on enough of HellaSwag to show more than luck."""
    return "hella" in run.streams and run.examples >= 1000  # a standard error of up to 1.4%


def beside_openai(run: LoggedRun) -> dict[str, tuple[float, float | None]]:
    """A run's best scores: {name: (its own, OpenAI's for this size and text or None)}."""
    rows: dict[str, tuple] = {}
    if "train" in run.streams:
        rows["lowest training loss"] = (min(run.streams["train"][1]), None)
    if "val" in run.streams:
        rows["lowest validation loss"] = (min(run.streams["val"][1]), openai_loss(run.config))
    if is_scored(run):
        theirs = OPENAI["hellaswag"]["GPT-2"].get(size_of(run.config))
        rows["highest HellaSwag"] = (max(run.streams["hella"][1]), theirs)
    return rows
