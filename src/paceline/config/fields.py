"""The kinds of value a config holds beyond plain numbers and strings, and how each is checked.

Each check returns the value or raises ``ValueError`` with the text a person reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from paceline.credentials import Secret, check_no_literals
from paceline.layout import Layout
from paceline.masking import is_reference, looks_secret, masked

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

_LONGEST_NAME = 100

OPTIMIZERS: dict[str, str] = {
    "adadelta": "torch.optim:Adadelta",
    "adafactor": "torch.optim:Adafactor",
    "adagrad": "torch.optim:Adagrad",
    "adam": "torch.optim:Adam",
    "adamax": "torch.optim:Adamax",
    "adamw": "torch.optim:AdamW",
    "nadam": "torch.optim:NAdam",
    "radam": "torch.optim:RAdam",
    "rmsprop": "torch.optim:RMSprop",
    "sgd": "torch.optim:SGD",
}
"""The optimizers that have a short name, and where each one lives."""

_RATES = {
    "adadelta": 1.0,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "adamax": 2e-3,
    "nadam": 2e-3,
    "rmsprop": 1e-2,
}

SCHEDULES = ("constant", "linear", "cosine")
"""The shapes of the learning rate that are Paceline's own."""

TORCH_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "StepLR",
)
"""The schedulers of torch that a config can describe, by the names of their classes."""

_SAME_SCHEDULE = {"cosine_annealing": "cosine", "constant_with_warmup": "constant"}
_LONGEST_TAG = 60


def default_lr(optimizer: Any) -> float:
    """The learning rate that torch gives an optimizer of this name where nobody names one."""
    return _RATES.get(optimizer, 1e-3) if isinstance(optimizer, str) else 1e-3


def _import_path(value: str) -> str:
    if _IMPORT_PATH.fullmatch(value):
        return value
    hint = ""
    module, colon, name = value.partition(":")
    if not colon and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
        module, _, name = value.rpartition(".")
        hint = f"; did you mean '{module}:{name}'?"
    elif module.endswith(".py") and name:
        module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        hint = f"; did you mean '{module}:{name}'?"
    raise ValueError(f"{value!r} is not an import path like 'package.module:Name'{hint}")


def _optimizer_name(value: str) -> str:
    if value in OPTIMIZERS or _IMPORT_PATH.fullmatch(value):
        return value
    near = difflib.get_close_matches(value.lower(), OPTIMIZERS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{value!r} is neither one of {', '.join(OPTIMIZERS)} nor an import path like "
        f"'package.module:Name'{hint}"
    )


def _schedule_name(value: str) -> str:
    if value in SCHEDULES or value in TORCH_SCHEDULERS or _IMPORT_PATH.fullmatch(value):
        return value
    known = {name.lower(): name for name in (*SCHEDULES, *TORCH_SCHEDULERS)}
    near = difflib.get_close_matches(value.lower(), known, n=1)
    meant = _SAME_SCHEDULE.get(value.lower()) or (known[near[0]] if near else None)
    raise ValueError(
        f"{value!r} is neither one of {', '.join(SCHEDULES)}, nor one of torch's "
        f"({', '.join(TORCH_SCHEDULERS)}), nor an import path like 'package.module:Name'"
        + (f"; did you mean {meant!r}?" if meant else "")
    )


def _metric(value: str) -> str:
    if _IMPORT_PATH.fullmatch(value) or re.fullmatch(r"[A-Z]\w*", value):
        return value
    try:
        return _import_path(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor the name of a metric of torchmetrics") from None


def _metrics(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name == "loss":
            raise ValueError("the name 'loss' is taken by the loss itself")
        if not name.strip() or not name.isprintable():
            raise ValueError(f"{name!r} cannot name a metric")
    return value


def check_tag(value: str) -> str:
    """A word by which runs are found again."""
    if len(value) > _LONGEST_TAG:
        raise ValueError(f"has {len(value)} characters; a tag has at most {_LONGEST_TAG}")
    if not re.fullmatch(r"[\w][\w.:/=+-]*", value):
        raise ValueError(
            f"{value!r} cannot be a tag; use letters, digits and any of . _ - : / = +, starting "
            "with a letter or a digit"
        )
    return value


def _layout(value: str) -> str:
    if value.strip() == "auto":
        return "auto"
    Layout.smallest(value)  # raises LayoutError, a ValueError, with its own message
    return value


def node_range(value: int | str) -> tuple[int, int]:
    """The least and the most machines that ``2`` or ``"1:4"`` stands for."""
    least, colon, most = str(value).strip().partition(":")
    try:
        low, high = int(least), int(most if colon else least)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise ValueError(f"{value!r} is neither a number of machines nor least:most, like '1:4'")
    return low, high


def _nodes(value: int | str) -> int | str:
    low, high = node_range(value)
    return low if low == high else f"{low}:{high}"


def _name(value: str) -> str:
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"has {len(value)} characters; a name has at most {_LONGEST_NAME}")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        return value
    raise ValueError(
        f"{value!r} cannot name a folder; use letters, digits, '.', '_' and '-', "
        "starting with a letter or a digit"
    )


def _plain(value: Any, path: str = "") -> Any:
    """``value`` as YAML can hold it (tuples become lists), or an error that names the odd part."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Secret) and value.reference:
        return value.reference
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(
                    f"key {key!r} must be a string{f' (in {path[1:]})' if path else ''}"
                )
        return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise ValueError(
        f"{path.removeprefix('.')} is a {kind}, which a YAML file cannot hold; "
        "use numbers, strings, true/false, null, lists and mappings"
    )


def _without_credentials(value: dict[str, Any]) -> dict[str, Any]:
    check_no_literals(value)
    return value


def _storage(value: dict[str, Any]) -> dict[str, Any]:
    check_no_literals(value, bare_key=True)
    return value


def _url(value: str) -> str:
    if looks_secret(value):
        raise ValueError(
            f"holds a credential, {masked(value)!r}; a config is kept and shown, so take it out of "
            "the URL"
        )
    return value


def _tracking_uri(value: str) -> str:
    if value.startswith("env:") and not is_reference(value):
        Secret(value)  # says what is wrong with it
    try:
        return _url(value)
    except ValueError as error:
        raise ValueError(
            f"{error}: write env:NAME, a variable that holds the whole URL; or leave uri out and "
            "set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        ) from None


def _checkpoint_url(value: str) -> str:
    try:
        return _url(value)
    except ValueError as error:
        raise ValueError(
            f"{error} and into checkpoint.storage, as env:NAME or file:/path"
        ) from None


def _environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} cannot name an environment variable")
        if name in LAUNCHERS_OWN or name.startswith("PACELINE_"):
            raise ValueError(f"{name} is set by the launcher; leave it out")
        if "\0" in text:
            raise ValueError(f"the value of {name} holds a NUL, which no variable can")
    check_no_literals(value)
    return value


LAUNCHERS_OWN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables that say which rank a process is: no config may."""
ImportPath = Annotated[str, AfterValidator(_import_path)]
OptimizerName = Annotated[str, AfterValidator(_optimizer_name)]
ScheduleName = Annotated[str, AfterValidator(_schedule_name)]
MetricPath = Annotated[str, AfterValidator(_metric)]
Tag = Annotated[str, AfterValidator(check_tag)]
LayoutText = Annotated[str, AfterValidator(_layout)]
Nodes = Annotated[int | str, AfterValidator(_nodes)]
RunName = Annotated[str, AfterValidator(_name)]
Args = Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(_without_credentials)]
StorageOptions = Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(_storage)]
EnvironmentVariables = Annotated[dict[str, str], AfterValidator(_environment)]
CheckpointURL = Annotated[str, AfterValidator(_checkpoint_url)]
TrackingURI = Annotated[str, AfterValidator(_tracking_uri)]
Positive = Annotated[int, Field(ge=1)]
MetricNames = AfterValidator(_metrics)


def args_of_default(data: Any, chooser: str, args: dict[str, Any]) -> Any:
    """Without a choice of its own, a section's ``args`` adjust the demo's; with one, they stand."""
    if not isinstance(data, Mapping):
        return data
    given = data.get("args", {})
    if chooser in data:
        return {"args": {}, **data}
    return {**data, "args": {**args, **given}} if isinstance(given, Mapping) else data
