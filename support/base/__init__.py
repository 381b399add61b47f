"""What every wing stands on: mistakes as sentences, flags, files, the process, the console."""
