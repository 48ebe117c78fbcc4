"""A second tree of modules over the same parameters, to change without touching the user's.

Every module is cloned without its tensors: parameters stay in the dictionaries of the original, so
a weight that is changed or replaced later is changed here too. Configs are copied, hooks are kept
as they were, buffers are shared unless a forward pass may write to them.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from foretell._errors import UnsupportedModelError


def shadow_of(model: Any, *, attention: str | None, num_layers: int | None = None) -> Any:
    """A clone of ``model`` in evaluation mode that shares its parameters.

    ``attention`` is the attention implementation its config names; None keeps the model's own.
    ``num_layers`` keeps that many decoder layers. Raises UnsupportedModelError for modules whose
    forward pass was replaced by hand, as offloading does: a clone would run the original.
    """
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise UnsupportedModelError(
                f"the forward pass of {name or 'the model'} was replaced (offloading to disk or "
                "other devices does that); load the model onto one device, without a device_map"
            )
    configs: dict[int, Any] = {}
    config = copy.deepcopy(model.config)
    _map_configs(model.config, config, configs)
    if attention is not None:
        config._attn_implementation = attention
    # The loop over experts computes each token alone; its faster forms depend on their number.
    config._experts_implementation = "eager"
    root = _clone(model, {}, configs)
    if num_layers is not None:
        layers = decoder_layers(root)
        if layers is None or not 1 <= num_layers <= len(layers):
            raise UnsupportedModelError("this model has no list of decoder layers to leave early")
        _truncate(root, layers, num_layers)
        config.get_text_config(decoder=True).num_hidden_layers = num_layers
    return root.eval()


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The list of decoder layers, found by its length; None if there is no such list."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in model.modules():
        if type(module) is nn.ModuleList and len(module) == count:
            return module
    return None


def _truncate(root: Any, layers: nn.ModuleList, count: int) -> None:
    shorter = nn.ModuleList(list(layers)[:count])
    for module in root.modules():
        for name, child in module._modules.items():
            if child is layers:
                module._modules[name] = shorter
                return


def _map_configs(original: Any, copied: Any, found: dict[int, Any]) -> None:
    found[id(original)] = copied
    for name, value in vars(original).items():
        if isinstance(value, PreTrainedConfig):
            _map_configs(value, getattr(copied, name), found)


def _clone(module: nn.Module, clones: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    if id(module) in clones:
        return clones[id(module)]
    clone = object.__new__(type(module))
    clones[id(module)] = clone
    state = dict(vars(module))
    for name, value in state.items():
        if isinstance(value, PreTrainedConfig) and name != "_modules":
            if id(value) not in configs:
                configs[id(value)] = copy.deepcopy(value)
            state[name] = configs[id(value)]
        elif name.endswith(("_hooks", "_hooks_with_kwargs")):
            state[name] = copy.copy(value)
    temporary = module._non_persistent_buffers_set
    state["_non_persistent_buffers_set"] = set(temporary)
    state["_buffers"] = {
        name: value.clone() if value is not None and name in temporary else value
        for name, value in module._buffers.items()
    }
    state["_modules"] = {
        name: None if child is None else _clone(child, clones, configs)
        for name, child in module._modules.items()
    }
    vars(clone).update(state)
    return clone
