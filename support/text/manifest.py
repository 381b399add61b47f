"""The manifest of a directory of shards: how they were made, what is in them, where to resume."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.base.errors import UserError, reading
from support.base.files import hash_file, write_whole
from support.base.flags import flag_of
from support.text import sources
from support.text.names import MANIFEST, TOKENIZER_FILE
from support.text.token_files import PUT_BACK, find_shards
from support.text.tokenizer import END, Tokenizer, tokenizer_of_data

LITERAL = f"{END} as text"
COUNTS = ("documents", "contaminated", "cuts", "dropped", LITERAL)  # what it counts of the text
# options that older manifests lack, and those of GPT-2's tokens
LATER_OPTIONS: dict[str, Any] = {"vocab_size": 0, "tokenizer": "", "val_source": []}


def open_manifest(folder: Path, options: dict, overwrite: bool) -> dict:
    """Returns the manifest of a folder, or a new one. Refuses a folder that does not match."""
    options = {key: value for key, value in options.items() if LATER_OPTIONS.get(key) != value}
    first: dict = {"options": options, "sources": {}, "files": {}, "shards": [], "tokens": 0}
    first["counts"] = dict.fromkeys(COUNTS, 0)
    first["cursor"] = {"file": 0, "text": 0, "token": 0}
    if not (folder / MANIFEST).exists():
        own = ("*.npy", "*.bin", TOKENIZER_FILE)  # names of what is written here
        if others := sorted(path for name in own for path in folder.glob(name)):
            raise UserError(f"{folder} holds {others[0].name}; choose another --data-dir")
        return first
    try:
        manifest = read_manifest(folder)
    except UserError:
        if overwrite:
            return first
        raise
    if "tokenizer" not in manifest and (folder / TOKENIZER_FILE).exists():
        raise UserError(f"{folder / TOKENIZER_FILE} is not of these shards: move it away")
    then = LATER_OPTIONS | manifest["options"]
    now = LATER_OPTIONS | options
    differing = [key for key in now if now[key] != then.get(key)]  # other versions lack some
    changes = [f"{flag_of(key)} was {then.get(key)}, not {now[key]}" for key in differing]
    names = [shard["name"] for shard in manifest["shards"]]
    changes += [f"{name} is missing" for name in names if not (folder / name).exists()]
    all_read = not manifest["cursor"] and manifest["tokens"] != options["max_tokens"]
    named = [*options.get("val_source", ()), *options["source"]]
    changes += sources.find_changes(named, manifest["files"], all_read)
    if changes and not overwrite:
        raise UserError(
            f"{folder} does not match: {'; '.join(changes[:9])} ({len(changes)} in all); "
            "choose another --data-dir, or rebuild it with --overwrite"
        )
    return first if overwrite and (changes or not manifest["cursor"]) else manifest


def read_manifest(folder: Path) -> dict:
    """Raises UserError if the manifest is missing, or is not what `write_manifest` has written."""
    path = folder / MANIFEST
    with reading(path):
        manifest = json.loads(path.read_bytes())
        if manifest.pop("checksum") != checksum(manifest):
            raise UserError(f"{path} is damaged: {PUT_BACK}")
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    text = json.dumps(manifest | {"checksum": checksum(manifest)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, text.encode())


def checksum(manifest: dict) -> str:
    """The SHA-256. Without it, a damaged cursor would silently lose text."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def verify_shards(folder: Path) -> str:
    """Compares each shard with its SHA-256 in the manifest. Raises UserError if they differ."""
    recorded = {shard["name"]: shard["sha256"] for shard in read_manifest(folder)["shards"]}
    tokenizer_of_data(folder)
    present = {name: hash_file(folder / name) for name in recorded if (folder / name).exists()}
    if damaged := ", ".join(name for name in recorded if present.get(name) != recorded[name]):
        raise UserError(f"{folder}: missing or damaged: {damaged}; {PUT_BACK}")
    find_shards(folder, "train")  # raises UserError if they are not all
    return f"{folder}: all {len(recorded)} shards are as they were written"


def begin_folder(folder: Path, manifest: dict, tokenizer: Tokenizer, first: str) -> None:
    """Writes the manifest and its vocabulary; with --overwrite, removes old shards, but `first`."""
    if (folder / MANIFEST).exists():  # --overwrite
        with suppress(UserError):  # of a damaged one, nobody knows the shards
            names = {shard["name"] for shard in read_manifest(folder)["shards"]}
            for old in names - {first}:
                (folder / old).unlink(missing_ok=True)
    write_manifest(folder, manifest)
    (folder / TOKENIZER_FILE).unlink(missing_ok=True)
    if "tokenizer" in manifest:
        write_whole(folder / TOKENIZER_FILE, tokenizer.json.encode())
