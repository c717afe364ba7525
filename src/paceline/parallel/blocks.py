"""The repeated blocks of a model: what is sharded, recomputed, compiled and placed one by one."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the model's repeated blocks, in the order in which the model holds them.

    A block is a child of a list of modules (``ModuleList``, ``Sequential``, ``ModuleDict``) that
    has parameters and a sibling of the same class. Lists inside a block belong to the block.
    """
    found: list[str] = []

    def look(module: nn.Module, name: str) -> None:
        children = list(module.named_children())
        kinds = [type(child) for _, child in children if _has_parameters(child)]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for key, child in children:
            path = f"{name}.{key}" if name else key
            repeated = is_list and kinds.count(type(child)) > 1 and _has_parameters(child)
            if repeated and any(True for _ in child.children()):
                found.append(path)
            else:
                look(child, path)

    look(model, "")
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
