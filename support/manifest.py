"""`manifest.json` beside the shards: how they were made, what is in them, where to go on."""

import hashlib
import json
from pathlib import Path

from support.common import UserError, hash_file, write_whole
from support.filters import COUNTS

NAME = "manifest.json"
CURSOR = {"file": int, "text": int, "token": int, "hashes": int, "read": str | None}
SHAPE = {
    "options": dict,
    "sources": dict,  # the commit of each on the hub
    "shards": [{"name": str, "split": str, "tokens": int, "sha256": str}],
    "tokens": int,
    "counts": dict.fromkeys(COUNTS, int),
    "cursor": CURSOR,  # where to go on; None: the folder is complete
}


def new_manifest(options: dict) -> dict:
    """The manifest of a folder that has no shards yet."""
    return {
        "options": options,
        "sources": {},
        "shards": [],
        "tokens": 0,
        "counts": dict.fromkeys(COUNTS, 0),
        "cursor": dict.fromkeys(CURSOR, 0) | {"read": None},
    }


def open_manifest(folder: Path, options: dict) -> dict:
    """The manifest of a folder, or the first one of an empty folder.

    Raises UserError if the folder was made with other options, or if a shard is missing.
    """
    if not (folder / NAME).exists():
        strange = sorted(folder.glob("*.npy"))
        if strange:
            told = f"{folder} has no {NAME} but holds {strange[0].name}"
            raise UserError(f"{told}; choose another --data-dir")
        return new_manifest(options)
    manifest = read_manifest(folder)
    before = manifest["options"]
    changed = []
    for key, value in options.items():
        if before.get(key) != value:
            changed.append(f"--{key.replace('_', '-')} {before.get(key)}, not {value}")
    if changed:
        told = f"{folder} was made with {'; '.join(changed)}"
        raise UserError(f"{told}: give the same again, or another --data-dir")
    for shard in manifest["shards"]:
        if not (folder / shard["name"]).exists():
            told = f"{folder / shard['name']} is missing"
            raise UserError(f"{told}; delete {folder} and start again")
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    text = json.dumps(manifest | {"checksum": checksum(manifest)}, indent=1) + "\n"
    write_whole(folder / NAME, text.encode())


def checksum(manifest: dict) -> str:
    """A hash of all but itself: a wrong digit in the cursor would lose text in silence."""
    content = {key: manifest[key] for key in SHAPE}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: Path) -> dict:
    """The manifest of a folder. Raises UserError if it cannot be read, or is not as written."""
    path = folder / NAME
    try:
        manifest = json.loads(path.read_bytes()) if path.is_file() else {}
    except OSError as error:
        told = f"{path} cannot be read ({error.strerror})"
        raise UserError(f"{told}; that mended, the same command goes on") from None
    except (ValueError, RecursionError):  # no JSON, or nested beyond all measure
        manifest = {}
    if not is_whole(manifest):
        told = f"{path} is damaged: it is not what fineweb.py has written"
        raise UserError(f"{told}; put back a copy, or delete {folder} and make it again")
    return manifest


def is_whole(manifest) -> bool:
    """Whether this is a manifest with nothing missing and nothing changed."""
    shape = SHAPE
    if isinstance(manifest, dict) and manifest.get("cursor", 0) is None:
        shape = SHAPE | {"cursor": type(None)}
    if not has_shape(manifest, shape):
        return False
    return manifest.get("checksum") in (None, checksum(manifest))  # older ones have none


def has_shape(value, shape) -> bool:
    """Whether a value from JSON has the keys and types of `shape`, and no number below zero."""
    if isinstance(shape, dict):
        if not isinstance(value, dict) or not value.keys() >= shape.keys():
            return False
        return all(has_shape(value[key], shape[key]) for key in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(item, shape[0]) for item in value)
    if shape is int:
        return type(value) is int and 0 <= value < 2**63
    return isinstance(value, shape)


def verify_shards(folder: Path) -> None:
    """Compares each shard with its sha256 in the manifest. Raises UserError if they differ."""
    if not (folder / NAME).exists():
        told = f"{folder} has no {NAME} to verify its shards by"
        raise UserError(f"{told}; --data-dir names another")
    shards = read_manifest(folder)["shards"]
    damaged = []
    for shard in shards:
        path = folder / shard["name"]
        try:
            is_whole = path.is_file() and hash_file(path) == shard["sha256"]
        except OSError as error:
            told = f"{path} cannot be read ({error.strerror})"
            raise UserError(f"{told}; that mended, --verify can tell") from None
        if not is_whole:
            damaged.append(shard["name"])
    if damaged:
        told = f"{folder}: missing or damaged: {', '.join(damaged)}"
        raise UserError(f"{told}; delete {folder} and make it again")
    print(f"{folder}: all {len(shards)} shards are as they were written")
