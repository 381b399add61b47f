"""What the scripts share, one file per concern. Nothing in here imports from the top level.

Below are the types that its files name in signatures: those of the scripts, and some of each other.
Only a type checker imports them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT, DataLoaderLite, GPTConfig
    from support.checkpoint import Progress
    from support.distributed import Stop, World
else:
    DataLoaderLite = GPT = GPTConfig = Progress = Stop = TrainConfig = World = Any
