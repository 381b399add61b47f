"""train_gpt2.py, but a thread writes the checkpoints on a CPU, too."""

from collections.abc import Callable
from copy import deepcopy

from support.base.console import run_script
from support.machine.distributed import under_torchrun
from support.run import checkpoint
from train_gpt2 import main


def write_beside(patch: Callable[[object, str, object], None] = setattr) -> None:
    """On a CPU, a thread writes the checkpoints. It gets copies of weights, as a GPU gives them."""
    take = checkpoint.state_dict.get_model_state_dict

    def copying(*args, **options):
        return deepcopy(take(*args, **options))

    patch(checkpoint, "SAVES_IN_BACKGROUND", {"cpu"})
    patch(checkpoint.state_dict, "get_model_state_dict", copying)


if __name__ == "__main__":
    write_beside()
    run_script(main, at_once=under_torchrun())
