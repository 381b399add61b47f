"""Text datasets of the Hugging Face hub, streamed: nothing is copied to the disk."""

import os
from collections.abc import Iterator
from functools import partial

from support.common import UserError, first_line
from support.readers import JSON, File, Text, check_column, read_rows

HUB = {  # name: hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]
    "fineweb-edu-10B": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
    "fineweb-edu-100B": "hub:HuggingFaceFW/fineweb-edu:sample-100BT",
    "fineweb-edu-350B": "hub:HuggingFaceFW/fineweb-edu:sample-350BT",
    "fineweb-10B": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "tinystories": "hub:roneneldan/TinyStories",
    "openwebtext": "hub:Skylion007/openwebtext",
}
OTHER_REVISION = "--revision refs/convert/parquet may help"


def find_on_hub(source: str, column: str, revision: str) -> Iterator[File]:
    """Yields the files of hub:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]], which `datasets` streams.

    Nothing is copied to the disk, and no code of the dataset's authors runs. An empty revision
    is the newest commit.
    """
    parts = [*source.removeprefix("hub:").split(":"), "", "", ""]  # all but the first are optional
    repository, config, split, own_column = parts[:4]
    column = own_column or column
    split = split or "train"
    builder, commit = open_on_hub(source, repository, config, revision)
    urls = list_urls(source, split, builder.config.data_files or {})
    stream = builder.as_streaming_dataset(split)
    check_column(source, column, stream.features.arrow_schema)
    stream = stream.select_columns(column)
    for i, url in enumerate(urls):  # each file is a shard of the stream
        yield File(url, 0, partial(read_hub, stream.shard(len(urls), i)), commit)


def open_on_hub(source: str, repository: str, config: str, revision: str):
    """The builder of `datasets` for a dataset, and the commit that the revision stands for.

    Making a builder is the first half of load_dataset(..., streaming=True). Between the halves
    one can look at the list of files.
    """
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import torch, 200 MB for nothing
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, disable_progress_bars

    disable_progress_bars()
    try:
        commit = HfApi().dataset_info(repository, revision=revision or None).sha
    except HFValidationError as error:
        told = f"--source {source} names no dataset ({first_line(error)})"
        raise UserError(f"{told}; write hub:OWNER/NAME") from None
    try:
        return load_dataset_builder(repository, config or None, revision=commit), commit
    except (ValueError, RuntimeError) as error:  # no such configuration, or a loading script
        reason = str(error).splitlines()[0]
        raise UserError(f"{source}: {reason} ({OTHER_REVISION})") from None


def list_urls(source: str, split: str, urls: dict[str, list[str]]) -> list[str]:
    """The files of a split. Raises UserError if there is no such split, or no reader for them."""
    if split not in urls:
        told = f"{source} has no split {split!r} but {', '.join(urls)}"
        raise UserError(f"{told}; write hub:OWNER/NAME:CONFIG:SPLIT")
    for url in urls[split]:
        if not url.endswith((".parquet", *JSON)):
            told = f"{url} is neither parquet nor jsonl, so it cannot be read"
            raise UserError(f"{told}; {OTHER_REVISION}")
    return urls[split]


def read_hub(stream) -> Iterator[Text]:
    """Yields the rows of a stream of `datasets` that has one column."""
    yield from read_rows(stream.with_format("arrow").iter(batch_size=100))
