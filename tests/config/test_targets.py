"""Import paths: refused without importing anything, followed where they lead, never in doubt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import check, import_target, load
from paceline.config.targets import UNKNOWN, Callee, look_up
from paceline.errors import ConfigError

MODULE = """
import dataclasses
from typing import overload
from functools import lru_cache
from helpers_of_mine.deep import Deep as Renamed
from helpers_of_mine import *

raise RuntimeError("reading a module must not run it")

class Net:
    def __init__(self, width, depth=2, *, bias, norm=True): ...
    class Inner:
        def __init__(self, x=1): ...
class Child(Net): ...
class Bare: ...
class Sets:
    __init__ = build_init = None
class Either:
    if True:
        def __init__(self, a): ...
    else:
        def __init__(self, b): ...
class Makes:
    def __new__(cls, a): ...
class Step:
    def __init__(self, parameters, lr, momentum=0.0): ...
class NoRate:
    def __init__(self, params): ...
def sets_it():
    global appears_later
class Any:
    def __init__(self, needed, **rest): ...
@dataclasses.dataclass
class Record:
    x: int
def build(a, /, b, *, c=1): ...
@lru_cache
def cached(a): ...
@overload
def many(a: int): ...
@overload
def many(a: str): ...
def many(a, b=1): ...
try:
    def either(a): ...
except ImportError:
    def either(b): ...
if True:
    inside = 3
first, (second, *third) = 1, (2, 3)
with open("x") as opened: ...
for looped in (): ...
made = build
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODULE)
    Path("helpers_of_mine").mkdir()
    Path("helpers_of_mine/__init__.py").write_text("from .deep import starred\n")
    Path("helpers_of_mine/deep.py").write_text(
        "class Deep:\n    def __init__(self, z): ...\ndef starred(y=1): ...\n"
    )
    Path("lazy.py").write_text("def __getattr__(name): ...\n")
    Path("swaps.py").write_text("import sys\nsys.modules[__name__] = object()\n")
    Path("broken.py").write_text("x = 1\ndef f(:\n")
    Path("torch").mkdir()  # a mere folder does not hide an installed package
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "good", "fails"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("mine:Net", Callee("class", ("width", "depth", "bias", "norm"), ("width", "bias"))),
        ("mine:Child", Callee("class", ("width", "depth", "bias", "norm"), ("width", "bias"))),
        ("mine:Net.Inner", Callee("class", ("x",))),
        ("mine:Bare", Callee("class", ())),
        ("mine:Any", Callee("class", None, ("needed",))),
        ("mine:Record", Callee("class")),
        ("mine:Sets", Callee("class")),
        ("mine:Either", Callee("class")),
        ("mine:Makes", Callee("class")),
        ("mine:appears_later", UNKNOWN),
        ("mine:build", Callee("function", ("b", "c"), ("a", "b"))),
        ("mine:cached", Callee("function")),
        ("mine:many", Callee("function", ("a", "b"), ("a",))),
        ("mine:Renamed", Callee("class", ("z",), ("z",))),
        ("mine:starred", Callee("function", ("y",))),
        ("helpers_of_mine.deep:Deep", Callee("class", ("z",), ("z",))),
        ("helpers_of_mine:deep", UNKNOWN),
        ("mine:either", UNKNOWN),
        ("mine:inside", UNKNOWN),
        ("mine:third", UNKNOWN),
        ("mine:opened", UNKNOWN),
        ("mine:looped", UNKNOWN),
        ("mine:made", UNKNOWN),
        ("mine:Child.made_by_base", UNKNOWN),
        ("lazy:Whatever", UNKNOWN),
        ("swaps:Whatever", UNKNOWN),
        ("os.path:join", UNKNOWN),
        ("math:sqrt", UNKNOWN),
    ],
)
def test_what_reading_tells(target: str, expected: Callee) -> None:
    assert look_up(target) == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine:Nett", "there is no 'Nett' in module 'mine'; did you mean 'mine:Net'?"),
        ("mine:stared", "there is no 'stared' in module 'mine'; did you mean 'mine:starred'?"),
        ("mine:zzz", "there is no 'zzz' in module 'mine'"),
        ("mine:Bare.x", "there is no 'Bare.x' in module 'mine'"),
        ("mien:Net", "there is no module 'mien'; did you mean 'mine'?"),
        ("helpers_of_mine.dep:Deep", "there is no module 'dep' in 'helpers_of_mine'; did you "
         "mean 'helpers_of_mine.deep'?"),
        ("mine.sub:Net", "there is no module 'sub' in 'mine'"),
    ],
)  # fmt: skip
def test_what_is_not_there(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        look_up(target)
    assert str(caught.value) == message


def test_a_syntax_error_in_the_users_module_is_shown_before_the_launch() -> None:
    with pytest.raises(ConfigError, match=r"module 'broken' is not valid Python: .*broken.py:2: "):
        look_up("broken:f")


def test_checking_imports_neither_torch_nor_the_users_code() -> None:
    config = load(
        {
            "model": {"target": "mine:Net", "args": {"widht": 3, "bias": True}},
            "loss": {"target": "mine:build", "args": {"d": 1}},
            "optimizer": {"name": "mine:NoRate", "args": {"momentum": 0.9}},
            "train": {"steps": 5},
        }
    )
    assert check(config, devices=0) == [
        "model.args: mine:Net has no argument 'widht'; did you mean 'width'?",
        "model.args: mine:Net needs the argument 'width'",
        "optimizer.name: mine:NoRate has no argument 'lr'",
        "optimizer.args: mine:NoRate has no argument 'momentum'; it takes none",
        "loss.args: mine:build has no argument 'd'; it takes b, c",
    ]
    assert "mine" not in sys.modules


def test_a_loss_function_gets_its_missing_arguments_at_each_step() -> None:
    config = load({"loss": {"target": "mine:many", "args": {"b": 2}}})
    assert check(config, devices=0) == []


def test_an_optimizer_may_call_its_parameters_what_it_likes() -> None:
    config = load({"optimizer": {"name": "mine:Step", "args": {"momentum": 0.9}}})
    assert check(config, devices=0) == []


def test_importing_a_target() -> None:
    Path("good.py").write_text("class Outer:\n    class Inner: ...\n")
    assert import_target("good:Outer.Inner").__qualname__ == "Outer.Inner"
    with pytest.raises(ConfigError, match=r"cannot import 'good:Otter': there is no 'Otter'; did"):
        import_target("good:Otter")
    with pytest.raises(ConfigError, match="cannot import 'nowhere:x': No module named 'nowhere'"):
        import_target("nowhere:x")
    with pytest.raises(ConfigError, match="'good' is not an import path"):
        import_target("good")


def test_an_error_inside_the_users_module_is_not_swallowed() -> None:
    Path("fails.py").write_text("raise RuntimeError('mine')\n")
    with pytest.raises(RuntimeError, match="mine"):
        import_target("fails:x")
