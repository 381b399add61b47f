"""The states of a run's optimizers as one dictionary by parameter names, for every sharding.

It is what a checkpoint keeps: AdamW's and Muon's moments, the embedding's without its padding.
"""

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support.common import UserError
from support.distributed import World
from support.fingerprint import EMBEDDING, HEAD

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gather_optimizers(model, optimizers: list, world: World) -> dict:
    """The state of all optimizers in one dictionary by parameter names, whole on rank 0.

    zero1's own state dictionaries go by numbers: here they get the names.
    """
    if world.sharding != "zero1":
        return get_optimizer_state_dict(model, optimizers, options=FULL)
    whole: dict = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        optimizer.consolidate_state_dict(to=0)
        if world.is_main:
            names = parameter_names(model, optimizer)
            numbered = optimizer.state_dict()
            for i, values in numbered["state"].items():
                whole["state"][names[i]] = values
            for group in numbered["param_groups"]:
                named = [names[i] for i in group["params"]]
                whole["param_groups"].append({**group, "params": named})
    return whole


def parameter_names(model, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def resize_embedding(optimizer_state: dict, rows: int) -> dict:
    """The same state with the embedding's moments cut or padded with zeros to `rows`.

    So the padding of the vocabulary is never saved.
    """

    def resize(x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return x
        missing = max(0, rows - len(x))
        return torch.cat([x[:rows], x.new_zeros(missing, x.size(1))])

    states = dict(optimizer_state["state"])
    for padded in {EMBEDDING, HEAD} & set(states):
        states[padded] = {name: resize(x) for name, x in states[padded].items()}
    return {**optimizer_state, "state": states}


def load_optimizers(
    model, optimizers: list[torch.optim.Optimizer], state: dict, world: World
) -> None:
    """Gives the optimizers their part of a checkpoint; `state` is its training_state.pt.

    The sharding and the padding of the embedding may have been others then. Raises UserError for
    a state that is not that of this model.
    """
    rows = model.transformer.wte.weight.size(0)
    whole = resize_embedding(state["optimizer"], rows)
    refuse_other_parameters(model, whole["state"])
    if world.sharding != "zero1":
        set_optimizer_state_dict(model, optimizers, whole, options=FULL)
        return
    for optimizer in optimizers:
        number = {name: i for i, name in enumerate(parameter_names(model, optimizer))}
        moments = {number[n]: values for n, values in whole["state"].items() if n in number}
        groups = [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in whole["param_groups"]
            if group["params"][0] in number
        ]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})


def refuse_other_parameters(model, states: dict) -> None:
    """Raises UserError unless there are moments for all parameters, of their shapes, or none."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    other = set(states) ^ set(shapes) if states else set()
    for name in set(states) & set(shapes):
        for moment in states[name].values():
            if isinstance(moment, torch.Tensor) and moment.dim() and moment.shape != shapes[name]:
                other.add(name)
    if other:
        raise UserError(
            f"the optimizer's state is of another model: {sorted(other)[0]} is missing, too much, "
            "or of another shape; --init-from takes the weights alone"
        )
