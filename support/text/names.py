"""Names that fineweb.py, training and the notebook share."""

# texts that need no network, by their names in --source, and as pictures call them
ALWAYS_THERE = {
    "tinyshakespeare": "Tiny Shakespeare",
    "tales": "tales",
    "stdlib": "Python's library",
}
MANIFEST = "manifest.json"  # in a directory of shards: how they were made
TOKENIZER_FILE = "tokenizer.json"  # beside shards and weights: their vocabulary
