"""Options as arguments: the docstring that lists them, their old names, and unknown names."""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from paceline.deprecation import warn_of_old_name
from paceline.errors import PacelineError, TrainingError
from paceline.options.declare import declared, members
from paceline.options.other_names import ELSEWHERE, IN_SECTION

T = TypeVar("T")
_OWNERS: list[type] = []
"""The classes of options."""
_NOT_OPTIONS = ("loss", "self", "unknown", "world")


def documented(owner: type[T]) -> type[T]:
    """Give a class of options a docstring that says what each of them is, and plain types.

    A name that is not among them is refused with the one that was probably meant.
    """
    made: Callable[..., None] = owner.__init__
    made.__annotations__ = {name: found.type for name, found in declared(owner).items()}
    _OWNERS.append(owner)

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(owner, kwargs.keys() - declared(owner).keys())
        made(self, *args, **kwargs)

    owner.__init__ = init  # type: ignore[method-assign]
    owner.__doc__ = f"{inspect.cleandoc(owner.__doc__ or '')}\n\nArgs:\n{arguments(owner)}"
    return owner


def arguments(owner: type, width: int = 92) -> str:
    """The options of ``owner`` as the section ``Args`` of a docstring lists them."""
    told = [f"{name}: {found.option.text}" for name, found in declared(owner).items()]
    return "\n".join(
        textwrap.fill(line, width, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for line in told
    )


def renamed(**names: str) -> Callable[[type[T]], type[T]]:
    """Let options be given, and read, by the names they had in the last version, with a warning."""

    def decorate(owner: type[T]) -> type[T]:
        made: Callable[..., None] = owner.__init__

        @functools.wraps(made)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for old, new in names.items():
                if old in kwargs:
                    warn_of_old_name(f"{owner.__name__}: {old}", new)
                    kwargs[new] = kwargs.pop(old)
            made(self, *args, **kwargs)

        owner.__init__ = init  # type: ignore[method-assign]
        for old, new in names.items():
            setattr(owner, old, property(functools.partial(_read_old, owner, old, new)))
        return owner

    return decorate


def _read_old(owner: type, old: str, new: str, options: Any) -> Any:
    warn_of_old_name(f"{owner.__name__}: {old}", new)
    return getattr(options, new)


def refuse_unknown(
    taker: Callable[..., Any],
    unknown: Collection[str],
    *,
    beside: Callable[..., Any] | None = None,
    error: type[PacelineError] = TrainingError,
) -> None:
    """Refuse the arguments ``unknown`` of ``taker``, each with what was probably meant.

    ``beside`` is a call that goes with ``taker``, as ``fit`` does with ``Trainer``: some look for
    its arguments here.
    """
    if not unknown:
        return
    taken = _parameters(taker)
    told = " ".join(
        f"{taker.__name__} got an unknown argument {name}.{_hint(name, taker, beside)}"
        for name in sorted(unknown)
    )
    options = {name: found for name, found in taken.items() if name != "optimizer"}
    known = [name for name, found in options.items() if found.default is not found.empty]
    raise error(f"{told} It takes {', '.join(sorted(known))}.")


def _parameters(taker: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(taker).parameters
    return {name: found[name] for name in found if name not in _NOT_OPTIONS}


def _hint(name: str, taker: Callable[..., Any], beside: Callable[..., Any] | None) -> str:
    taken = _parameters(taker)
    for one in _names_here(name, taker):
        if one in taken:
            return f" It is called {one} here."
    if within := list(_within(name, taken)):
        return f" Pass {' or '.join(within)}."
    if beside is not None:
        others = _parameters(beside)
        for one in (name, *_names_here(name, beside)):
            if one in others:
                return f" Pass it to {beside.__name__}({one}=…)."
    if ELSEWHERE.get(name, "").startswith("optimizer."):
        return " It is the optimizer's: pass it where you make that."
    if near := difflib.get_close_matches(name, taken, n=1):
        return f" Did you mean {near[0]}?"
    if beside is not None and (near := difflib.get_close_matches(name, _parameters(beside), n=1)):
        return f" Did you mean {beside.__name__}({near[0]}=…)?"
    return ""


def _names_here(name: str, taker: Callable[..., Any]) -> list[str]:
    """What an option of ``taker`` may be called that other frameworks call ``name``."""
    key = ELSEWHERE.get(name)
    if taker in _OWNERS:
        ours = [found.name for found in declared(taker).values() if key and found.key == key]
        return [*ours, IN_SECTION.get(name, "")]
    return [] if key is None else [key.rpartition(".")[2]]


def _within(name: str, taken: Collection[str]) -> Iterator[str]:
    """How an option of one of the classes of options among ``taken`` is written."""
    key = ELSEWHERE.get(name)
    for outer in (found for owner in _OWNERS for found in declared(owner).values()):
        inner = [kind for kind in members(outer.type) if kind in _OWNERS]
        if outer.name not in taken or not inner:
            continue
        for found in declared(inner[0]).values():
            if found.key == key if key else found.name == name:
                yield f"{outer.name}=paceline.{inner[0].__name__}({found.name}=…)"
