"""Ready-made shards of GPT-2's tokens: a dataset of llm.c's .bin files on the Hugging Face hub."""

import math
import re
from pathlib import Path

from support.base.errors import UserError, reading
from support.base.files import hash_file
from support.text.manifest import begin_folder, write_manifest
from support.text.names import MANIFEST
from support.text.sources import FIRST_ANSWER
from support.text.token_files import Shard
from support.text.tokenizer import Tokenizer, gpt2

SHARD_NAME = re.compile(r"(.*[/_])?(train|val)(_\d+)?\.bin")  # that are taken


def fetch_shards(source: str, folder: Path, manifest: dict) -> tuple[Tokenizer, str]:
    """Downloads a dataset's shards -> their vocabulary, and which text is for validation."""
    from huggingface_hub import HfApi, hf_hub_download

    tokenizer = gpt2()
    options = manifest["options"]
    repo = source.removeprefix("tokens:")
    with reading(source):
        commit = manifest["sources"].get(source) or options["revision"] or None
        info = HfApi().dataset_info(
            repo, revision=commit, timeout=FIRST_ANSWER, files_metadata=True
        )
    files = {file.rfilename: file for file in info.siblings or []}
    matches = list(filter(None, map(SHARD_NAME.fullmatch, files)))
    splits = {match[0]: match[2] for match in matches}
    if len(sets := sorted({(match[1] or "") + match[2] for match in matches})) > 2:
        raise UserError(f"{source} holds several sets of tokens, {sets}: name a dataset of one")
    if {*splits.values()} != {"train", "val"}:
        raise UserError(f"{source}: it has no files like *_train_000001.bin and *_val_000000.bin")
    manifest["sources"][source] = info.sha
    shards = manifest["shards"]
    if shards or not (folder / MANIFEST).exists():
        write_manifest(folder, manifest)  # the folder's files belong to it, also after a kill
    most = options["max_tokens"] or math.inf
    ordered = sorted(splits, key=lambda name: (splits[name] == "train", name))
    for name in ordered[len(shards) :]:  # the others have been checked
        if "train" in (shard["split"] for shard in shards) and manifest["tokens"] >= most:
            break
        with reading(f"{source}, {name}"):
            hf_hub_download(repo, name, repo_type="dataset", revision=info.sha, local_dir=folder)
        lfs = files[name].lfs
        announced = lfs.sha256 if lfs else None  # by the hub
        num_tokens, documents, sha256 = check_ready(folder / name, tokenizer.eot, announced)
        if not shards:
            begin_folder(folder, manifest, tokenizer, name)
        shards.append({"name": name, "split": splits[name], "tokens": num_tokens, "sha256": sha256})
        manifest["tokens"] += num_tokens
        manifest["counts"]["documents"] += documents
        write_manifest(folder, manifest)
    return tokenizer, "the dataset's own"


def check_ready(path: Path, eot: int, announced: str | None) -> tuple[int, int, str]:
    """Its tokens, documents and SHA-256. Raises UserError if it is damaged or not GPT-2's."""
    sha256 = hash_file(path)
    if announced not in (sha256, None):
        path.unlink()
        raise UserError(f"{path} was damaged on its way: start again")
    shard = Shard(path)
    documents = 0
    for tokens in shard.read_all():
        if not shard.offset or tokens.max() > eot:
            raise UserError(f"{path} has no GPT-2 tokens in llm.c's format: name another dataset")
        documents += int((tokens == eot).sum())
    if documents == shard.num_tokens:
        raise UserError(f"{path} has no text, only <|endoftext|>: name another dataset")
    return shard.num_tokens, documents, sha256
