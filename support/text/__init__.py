"""From text to tokens: sources, vocabularies, the files of tokens."""
