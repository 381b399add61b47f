"""HellaSwag's examples: the official files, and local ones of the same form."""

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path

from support.common import UserError
from support.download import download_once

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"
BLOB_IDS = {  # git's names for the contents of these files
    "train": "1997e15fe638ef2aeec6993471159295cd75aab7",
    "val": "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
    "test": "7a4b590ea240595f468bfbc7f2c744e5eef72da5",
}


def download(
    split: str, folder="hellaswag", url=URL, blob_ids=BLOB_IDS, attempts=3, patience=1.0
) -> Path:
    """The official jsonl file of a split (train, val or test); fetched into `folder` if not there.

    Raises UserError for another split, and as `download_once` does.
    """
    if split not in blob_ids:
        raise UserError(f"HellaSwag has no split {split!r}: use one of {', '.join(blob_ids)}")
    return download_once(
        Path(folder) / f"hellaswag_{split}.jsonl",
        url.format(split=split),
        blob_ids[split],
        title="HellaSwag",
        instead="give the file by --hellaswag-path (hellaswag.py: --path)",
        attempts=attempts,
        patience=patience,
    )


def iterate_examples(split: str = "val", path: str | Path = "") -> Iterator[dict]:
    """Yields the examples of a split, downloaded if need be, or those of a local jsonl file.

    Each is a dict with the text `ctx`, four texts `endings`, and `label`, the index of the right
    one. Raises UserError for a file that is empty or cannot be read, and at the first line that is
    no example.
    """
    path = Path(path) if path else download(split)
    remedy = "name a jsonl file, or none to download HellaSwag"
    empty = True
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file: {remedy}")
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    empty = False
                    yield parse_example(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if empty:
        raise UserError(f"{path} is empty: one example a line was expected; fetch it again")


def parse_example(line: bytes, where: str) -> dict:
    """A line of a file as an example. Raises UserError, which begins with `where`, for others."""
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{where} is not JSON ({error}): mend it, or fetch the file again"
        raise UserError(problem) from None
    check_example(example, where)
    return example


def check_example(example, where: str) -> None:
    """Raises UserError, which begins with `where`, unless this is an example.

    A label may be missing, as in the test split, but not wrong.
    """
    fields = example if isinstance(example, dict) else {}
    context = fields.get("ctx")
    endings = fields.get("endings")
    label = fields.get("label", 0)
    if not isinstance(context, str) or not context:
        problem = "has no text under `ctx`"
    elif not isinstance(endings, list) or not all(isinstance(e, str) for e in endings):
        problem = "has no list of texts under `endings`"
    elif len(endings) != 4:
        problem = f"has {len(endings)} endings"
    elif not isinstance(label, int | str) or str(label) not in ("0", "1", "2", "3"):
        problem = f"has the label {reprlib.repr(label)}"
    else:
        return
    raise UserError(
        f"{where} {problem}: an example is a `ctx`, 4 `endings` and a `label` from 0 to 3; "
        "mend or remove it"
    )
