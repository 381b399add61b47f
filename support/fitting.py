"""The micro-batch finds its own size."""

import os

import torch

from support.common import UserError
from support.device import autocast, free_memory, total_memory
from support.distributed import World
from support.memory import HEADROOM, estimate_memory, largest_batch, room_beside_weights
from support.tokenizer import VOCAB_SIZE


def fit_batch_size(raw, config, world: World, dtype: torch.dtype) -> int:
    """The largest power of two up to 64 that divides the batch and fits in memory.

    It is the same on every process. On a GPU it tries. On a CPU, where running out of memory
    raises nothing, and with fsdp, where a process that fails would leave the others waiting, it
    takes the estimate of support/memory.py.
    """
    T = config.sequence_length
    sequences = config.total_batch_size // T // world.size
    muon = config.optimizer == "muon"
    if world.device.type == "cuda" and world.sharding != "fsdp":
        B = largest_batch(
            sequences,
            lambda B: not world.any(runs_out_of_memory(raw, B, T, world, dtype, muon)),
        )
        torch.cuda.reset_peak_memory_stats()
        return B
    room = room_beside_weights(find_free_memory(world.device), world.device.type)

    def fits(B: int) -> bool:
        parts = parts_of_memory(raw, B, T, world, dtype, muon)
        return not world.any(sum(parts.values()) - parts["weights"] > room)

    return largest_batch(sequences, fits)


def parts_of_memory(
    raw, B: int, T: int, world: World, dtype: torch.dtype, muon: bool = False
) -> dict[str, int]:
    """What this process needs, by part (memory.estimate_memory)."""
    return estimate_memory(
        raw.config,
        B=B,
        T=T,
        width=dtype.itemsize,
        device=world.device.type,
        sharding=world.sharding,
        processes=world.size,
        muon=muon,
    )


def find_free_memory(device: torch.device) -> float:
    """Bytes that this process may count on: its share, where processes share a machine's memory."""
    known = free_memory(device)
    free = 4 * 2**30 if known is None else known  # 4 GB where the system does not say
    if device.type == "cpu":
        return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return free


def runs_out_of_memory(
    raw, B: int, T: int, world: World, dtype: torch.dtype, muon: bool = False
) -> bool:
    """Whether a micro-batch of B sequences is too much for this GPU.

    Beside it there must be room for the optimizer's moments, the buckets in which DDP averages
    gradients, and 3% of all memory, because the allocator cannot fill every hole.
    """
    parts = parts_of_memory(raw, B, T, world, dtype, muon)
    beside = parts["moments"] + parts["buckets"]
    spare = round(HEADROOM * total_memory(world.device))
    try:
        taken = torch.empty(beside, dtype=torch.uint8, device=world.device)
        headroom = torch.empty(spare, dtype=torch.uint8, device=world.device)
        x = torch.zeros(B, T, dtype=torch.int64, device=world.device)
        # from the second micro-step on, the gradients are there before the activations
        for _ in range(2):
            with autocast(world.device, dtype):
                _, loss = raw(x, x)
            loss.backward()
        del taken, headroom
        return False
    except RuntimeError as error:  # torch.OutOfMemoryError is one; Triton has its own
        if "out of memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        return True
    finally:
        raw.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def refuse_too_large(shape: dict) -> None:
    """Raises UserError for a model whose weights alone do not fit into this machine's memory."""
    L, C, T = shape["n_layer"], shape["n_embd"], shape["block_size"]
    V = shape.get("vocab_size", VOCAB_SIZE)
    need = 4 * (12 * L * C**2 + (T + V) * C)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # each makes its own, on the CPU first
    free = free_memory(torch.device("cpu"))
    if free is not None and need * processes > free:
        raise UserError(
            f"a model of n_layer {L}, n_embd {C} and {T} positions needs {need:,} bytes for its "
            f"weights in each process, {free:,} are free here: use smaller ones"
        )


def explain_out_of_memory(batch_size: int, config) -> str:
    """What to do when a GPU has no room for a micro-batch; 0: not even for the model."""
    if batch_size == 0:
        return (
            "out of GPU memory before the first step: is another program using this GPU? "
            "--sharding fsdp divides the model among several"
        )
    if batch_size > 1:
        less = f"--batch-size {batch_size // 2}"
    elif not config.activation_checkpointing:
        less = "--activation-checkpointing"
    else:
        less = "--sharding fsdp, on several GPUs"
    return (
        f"out of GPU memory with micro-batches of {batch_size}: add {less}; the run stays the same"
    )
