"""Parameter groups by rule: weight decay for weights alone, and settings by patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paceline.errors import TrainingError
from paceline.options.declare import shown

_SHOWN = 8


def parameter_groups(
    model: nn.Module,
    groups: Mapping[str | tuple[str, ...], Mapping[str, Any]]
    | Sequence[tuple[str | Sequence[str], Mapping[str, Any]]] = (),
    *,
    weight_decay: float | None = None,
    decay: str = "weights",
) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` in groups, as any optimizer of torch takes them.

        groups = paceline.parameter_groups(model, {"backbone.*": {"lr": 1e-5}}, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups, lr=1e-3)

    Args:
        model: The model.
        groups: Settings by pattern of names (``*`` stands for anything), such as
            ``{"backbone.*": {"lr": 1e-5}}``, or pairs of patterns and settings. A parameter has the
            settings of the first pattern that it matches.
        weight_decay: Weight decay of parameters for which ``groups`` names none. None: the
            optimizer's own.
        decay: Which parameters have weight decay at all, where ``groups`` says nothing else:
            ``"all"``, or ``"weights"``: none for biases, the parameters of norms and others with
            fewer than two dimensions.

    Raises ``TrainingError`` for a pattern that no trainable parameter matches.
    """
    if decay not in ("all", "weights"):
        raise TrainingError(f"parameter_groups: decay={shown(decay)} must be 'all' or 'weights'.")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rules = [(_patterns(match), dict(settings)) for match, settings in _pairs(groups)]
    _check_all_match(rules, named, model)
    spared = set() if decay == "all" else _not_weights(model)
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        rule = next(
            (i for i, (patterns, _) in enumerate(rules) if _matches(name, patterns)), len(rules)
        )
        settings = rules[rule][1] if rule < len(rules) else {}
        is_spared = name in spared and "weight_decay" not in settings
        group = found.setdefault((rule, is_spared), {**settings, "params": []})
        if is_spared:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group.setdefault("weight_decay", weight_decay)
        group["params"].append(parameter)
    # What no pattern names comes first: the rate that a run reports is that of the first group.
    ordered = sorted(found, key=lambda key: (key[0] != len(rules), key))
    return [found[key] for key in ordered]


def _pairs(groups: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    pairs = list(groups.items() if isinstance(groups, Mapping) else groups)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Mapping)):
            raise TrainingError(
                f"parameter_groups: {shown(pair)} must be a pattern with its settings, such as "
                "('backbone.*', {'lr': 1e-5})."
            )
        if "params" in pair[1]:
            raise TrainingError(
                f"parameter_groups: the settings of {pair[0]!r} hold 'params'; which parameters "
                "they are for is said by the pattern."
            )
    return pairs


def _patterns(match: Any) -> tuple[str, ...]:
    patterns = (match,) if isinstance(match, str) else tuple(match)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TrainingError(
            f"parameter_groups: {shown(match)} must be a pattern of names of parameters, such as "
            "'*.bias', or a list of them."
        )
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_all_match(
    rules: Sequence[tuple[tuple[str, ...], Any]], named: Mapping[str, Any], model: nn.Module
) -> None:
    for pattern in (pattern for patterns, _ in rules for pattern in patterns):
        if fnmatch.filter(named, pattern):
            continue
        if frozen := fnmatch.filter([name for name, _ in model.named_parameters()], pattern):
            raise TrainingError(
                f"parameter_groups: the pattern {pattern!r} matches parameters that are frozen "
                f"only ({', '.join(frozen[:_SHOWN])}). Leave it out."
            )
        names = [*list(named)[:_SHOWN], *(["…"] if len(named) > _SHOWN else [])]
        raise TrainingError(
            f"parameter_groups: no parameter matches {pattern!r}. The parameters are "
            f"{', '.join(names)}; '*' stands for anything, dots included."
        )


def _not_weights(model: nn.Module) -> set[str]:
    """The names of biases, of what norms hold, and of everything else that is no matrix."""
    found = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" or name.endswith("_bias") or name.startswith("bias_")
            # By its name: every library has norms of its own, few of them derived from torch's.
            is_norm = "norm" in type(module).__name__.lower()
            if is_bias or is_norm or parameter.dim() < 2:
                found.add(f"{prefix}.{name}" if prefix else name)
    return found
