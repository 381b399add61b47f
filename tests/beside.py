"""train_gpt2.py, but a thread writes the checkpoints on a CPU, too."""

from support import checkpoint
from support.common import run_script
from support.distributed import several
from train_gpt2 import main

if __name__ == "__main__":
    checkpoint.BESIDE = {"cpu"}
    run_script(main, at_once=several())
