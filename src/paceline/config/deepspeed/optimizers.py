"""DeepSpeed's optimizers by their names: the class here that does the same, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.deepspeed.keys import AUTO
from paceline.config.keys import nearest

_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "set_grad_none")
_ADAM_OWN = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
_TORCH = (
    "Adadelta",
    "Adafactor",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_ONE_BIT = (
    "it sends gradients in one bit, by an update of its own. Use Adam, and compress: int8 or "
    "topk:0.01 where the network is slow."
)
_NOT_HERE = {
    "onebitadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "lamb": "torch has no LAMB. Pass an optimizer of your own as optimizer=, or name it in a "
    "config: optimizer.name: 'package.module:Lamb'.",
    "muon": "it reads param.use_muon of every parameter. Make torch.optim.Muon for the matrices "
    "and pass it as optimizer=, or name it in a config: optimizer.name: 'torch.optim:Muon'.",
    "fusedadam": "DeepSpeed's name for it in a config is Adam.",
    "cpuadam": "DeepSpeed's name for it in a config is Adam, with offload_optimizer.",
    "deepspeedcpuadam": "DeepSpeed's name for it in a config is Adam, with offload_optimizer.",
    "lbfgs": "it needs a closure, which an engine does not give.",
    "sparseadam": "it takes sparse gradients alone, and those are not summed over ranks here.",
}
_HF_DEFAULTS = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""What Hugging Face's trainer gives for "auto" where its own arguments say nothing."""


@dataclass
class OptimizerChoice:
    """The class to use, as an import path, with its arguments, or the problems with them."""

    name: str = "torch.optim:AdamW"
    args: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)


def choose_optimizer(kind: str, params: Mapping[str, Any]) -> OptimizerChoice:
    """What ``{"type": kind, "params": params}`` asks for."""
    choice = OptimizerChoice()
    given = dict(params)
    if "max_grad_norm" in given:
        given.pop("max_grad_norm")
        choice.problems.append(
            "optimizer.params.max_grad_norm: DeepSpeed takes it from no optimizer. Write "
            "gradient_clipping beside optimizer instead."
        )
    word = kind.lower()
    if word in ("adam", "adamw"):
        _choose_adam(choice, word, given)
    elif word == "lion":
        choice.name = "paceline.compat.deepspeed.optimizers:Lion"
        _take(choice, given, ("lr", "betas", "weight_decay"), {"weight_decay": 0.0})
    elif word == "adagrad":
        choice.name = "torch.optim:Adagrad"
        choice.args = _without_auto(choice, given)
    elif word in _MUP:
        choice.name = f"mup:{_MUP[word]}"
        choice.args = _without_auto(choice, given)
    elif kind in _TORCH:
        choice.name = f"torch.optim:{kind}"
        choice.args = _without_auto(choice, given)
    elif word in _NOT_HERE:
        choice.problems.append(f"optimizer.type={kind!r} is not supported: {_NOT_HERE[word]}")
    else:
        near = nearest(kind, ("Adam", "AdamW", "Lion", "Adagrad", *_TORCH))
        hint = f"did you mean {near!r}?" if near else f"use Adam, AdamW, Lion, {', '.join(_TORCH)}."
        choice.problems.append(f"optimizer.type={kind!r} is no optimizer of DeepSpeed's; {hint}")
    return choice


def _choose_adam(choice: OptimizerChoice, word: str, given: dict[str, Any]) -> None:
    """Adam is AdamW there, unless ``adam_w_mode`` is false; its weight decay is 0 by default."""
    torch_adam = bool(given.pop("torch_adam", False))
    decoupled = word == "adamw" or bool(given.pop("adam_w_mode", True))
    given.pop("adam_w_mode", None)
    given.pop("fp32_optimizer_states", None)
    given.pop("set_grad_none", None)
    if word == "adam" and decoupled:
        choice.notes.append(
            "optimizer.type: Adam is AdamW, as in DeepSpeed; adam_w_mode: false makes it Adam."
        )
    choice.name = f"torch.optim:{'AdamW' if decoupled else 'Adam'}"
    if torch_adam:  # torch's own defaults, the weight decay of AdamW included
        choice.args = _without_auto(choice, given)
        return
    for flag, right in (("bias_correction", True), ("amsgrad", False)):
        if given.pop(flag, right) not in (right, AUTO):
            choice.problems.append(
                f"optimizer.params.{flag}={str(not right).lower()} is not supported with "
                f"DeepSpeed's Adam. Leave it out."
            )
    _take(choice, given, ("lr", "betas", "eps", "weight_decay"), {"weight_decay": 0.0})


def _take(
    choice: OptimizerChoice, given: Mapping[str, Any], names: tuple[str, ...], default: Any
) -> None:
    known = {name: value for name, value in given.items() if name in names}
    for name in given:
        if name not in names and name != "set_grad_none":
            near = nearest(name, (*_ADAM, *_ADAM_OWN))
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(names)}."
            choice.problems.append(f"unknown key 'optimizer.params.{name}'; {hint}")
    choice.args = {**default, **_without_auto(choice, known)}


def _without_auto(choice: OptimizerChoice, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with what "auto" stands for; the learning rate has to be asked for."""
    args = {}
    for name, value in given.items():
        if value != AUTO:
            args[name] = value
        elif name in _HF_DEFAULTS:
            choice.autos.append(f"optimizer.params.{name}")
            args[name] = _HF_DEFAULTS[name]
        else:
            choice.autos.append(f"optimizer.params.{name}")
    return args
