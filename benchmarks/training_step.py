"""The training step that bench.py times, with each technique on or off."""

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT, DataLoaderLite, GPTConfig, decay_groups
from support.device import compile_blocks, keep_freed_memory, keep_less, newest_flash_attention
from support.distributed import World
from support.tokenizer import EOT
from train_gpt2 import train_step


class MadeUpTokens(DataLoaderLite):
    """The real loader on a shard of random tokens, in documents of 1,000.

    `waited` counts the seconds that steps have waited for it.
    """

    def __init__(self, B: int, T: int, world: World):
        self.waited = 0.0
        self.folder = tempfile.TemporaryDirectory()
        tokens = np.random.default_rng(0).integers(EOT, size=2_000_000, dtype=np.uint16)
        tokens[::1000] = EOT
        np.save(Path(self.folder.name) / "made-up_train_000001.npy", tokens)
        super().__init__(self.folder.name, "train", B, T, world.rank, world.size, shuffle=True)

    def next_batch(self):
        start = time.perf_counter()
        batch = super().next_batch()
        self.waited += time.perf_counter() - start
        return batch


def make_model(
    *,
    size: dict[str, int],
    T: int,
    hf: bool = False,
    own_loss: bool = True,
    pad_vocab_to: int = 128,
) -> torch.nn.Module:
    """Our GPT, or with hf transformers' GPT-2: called with x and y (B, T), it returns (…, loss).

    own_loss: the model computes the loss in its own way. Else it is computed in the way that
    everyone writes first, over the float32 logits of all tokens.
    """
    if hf:
        return make_transformers_model(size, T)
    model = GPT(GPTConfig(block_size=T, pad_vocab_to=pad_vocab_to, **size))

    def plain_forward(x, y):
        logits = model.logits(model.hidden(x)).float()
        return None, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    if not own_loss:
        model.forward = plain_forward
    return model


def make_transformers_model(size: dict[str, int], T: int) -> torch.nn.Module:
    """transformers' GPT-2 without dropout, called as ours is."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=T, **size, **no_dropout))
    their_forward = model.forward

    def forward(x, y):
        result = their_forward(input_ids=x, labels=x, use_cache=False)  # it shifts the labels
        return None, result.loss

    model.forward = forward
    return model


def training(
    world: World,
    *,
    B: int,
    T: int,
    size: dict[str, int],
    dtype: torch.dtype,
    tf32: bool,
    compile: bool,
    flash: bool,
    pad_vocab_to: int,
    fused: bool,
    own_loss: bool,
    recompute: bool,
    keep_memory: bool,
    hf: bool = False,
    optimizer: str = "adamw",
) -> Callable:
    """Makes a run of the real train_step on made-up tokens.

    The run returns the loss, and the seconds that it waited for the loader. The options from tf32
    to keep_memory are the techniques of the ladder.
    """
    choose_kernels(world.device, tf32, flash)
    if keep_memory:
        keep_freed_memory(world.device)
    raw = make_model(size=size, T=T, hf=hf, own_loss=own_loss, pad_vocab_to=pad_vocab_to)
    raw.to(world.device)
    if compile:
        raw = compile_step(raw, recompute, in_blocks=own_loss and not hf)
    model = world.wrap(raw)
    optimizers = make_optimizers(raw, optimizer, fused)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    loader = MadeUpTokens(B, T, world)

    def run() -> dict:
        waited_before = loader.waited
        with nullcontext() if flash else sdpa_kernel([SDPBackend.MATH]):
            loss, _ = train_step(
                model=model,
                optimizers=optimizers,
                scaler=scaler,
                loader=loader,
                grad_accum_steps=1,
                world=world,
                dtype=dtype,
                lr=6e-4,
                grad_clip=1.0,
            )
        return dict(loss=loss, waited=loader.waited - waited_before)

    return run


def compile_step(raw: torch.nn.Module, recompute: bool, in_blocks: bool) -> torch.nn.Module:
    """The compiled model: in place as training does it, or any other model as a whole."""
    if in_blocks:
        compile_blocks(raw, recompute)
        return raw
    keep_less(recompute)
    return torch.compile(raw, dynamic=False)


def choose_kernels(device: torch.device, tf32: bool, flash: bool) -> None:
    """Settings of this process: TF32 for matmuls or not, the newest fused attention or none."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # AOTAutograd's cache does not know which attention a graph was traced with: it would hand the
    # fused kernel to the step without it
    functorch_config.enable_autograd_cache = flash
    if flash:
        newest_flash_attention(device)


def make_optimizers(raw: torch.nn.Module, name: str, fused: bool) -> list[torch.optim.Optimizer]:
    """Muon and AdamW as training makes them; or AdamW alone, for any model, fused or not."""
    if name == "muon":
        return raw.configure_optimizers(muon=True)
    groups = decay_groups(list(raw.parameters()), weight_decay=0.1)
    fused_or_default = fused or None  # None is PyTorch's default
    return [torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=fused_or_default)]
