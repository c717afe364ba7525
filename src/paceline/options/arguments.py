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
from paceline.options.habits import HABITS, IN_CALL, IN_SECTION, SENTENCES, Habit, habit_of

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
    its arguments here. Where nobody can say what was meant of one, all that there are are listed.
    """
    if not unknown:
        return
    answers = {name: _answer(name, taker, beside) for name in sorted(unknown)}
    told = " ".join(
        f"{taker.__name__} got an unknown argument {name}.{answer and f' {answer}'}"
        for name, answer in answers.items()
    )
    if all(answers.values()):
        raise error(told)
    taken = {name: found for name, found in _parameters(taker).items() if name != "optimizer"}
    known = [name for name, found in taken.items() if found.default is not found.empty]
    raise error(f"{told} It takes {', '.join(sorted(known))}.")


def _parameters(taker: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(taker).parameters
    return {name: found[name] for name in found if name not in _NOT_OPTIONS}


def _answer(name: str, taker: Callable[..., Any], beside: Callable[..., Any] | None) -> str:
    """What to say to the argument ``name``; empty where nothing comes near."""
    taken = _parameters(taker)
    habit = habit_of(name)
    if taker in _OWNERS and (ours := _name_in(taker, name, habit)):
        return ours
    if own := SENTENCES.get(taker.__name__, {}).get(name):
        return own
    if same := IN_CALL.get(taker.__name__, {}).get(name):
        return f"It is called {same} here."
    if habit is not None and taker not in _OWNERS:
        return habit.meaning.sentence(taker.__name__)
    if within := list(_within(name, taken)):
        return f"Pass {' or '.join(within)}."
    if beside is not None and name in _parameters(beside):
        return f"Pass it to {beside.__name__}({name}=…)."
    if near := difflib.get_close_matches(name, taken, n=1):
        return f"Did you mean {near[0]}?"
    if beside is not None and (near := difflib.get_close_matches(name, _parameters(beside), n=1)):
        return f"Did you mean {beside.__name__}({near[0]}=…)?"
    if habit is not None:
        return habit.meaning.sentence(taker.__name__)
    if near := difflib.get_close_matches(name.lower(), HABITS, n=1, cutoff=0.85):
        return f"Did you mean {near[0]}? {HABITS[near[0]].meaning.sentence(taker.__name__)}"
    return ""


def _name_in(owner: type, name: str, habit: Habit | None) -> str:
    """What an option of the class ``owner`` is called that others call ``name``."""
    options = declared(owner)
    if habit is not None and (key := habit.meaning.key):
        for found in options.values():
            if found.key == key:
                value = _as_python(habit.meaning.value)
                return f"It is called {found.name} here: {owner.__name__}({found.name}={value})."
    return next(
        (f"It is called {one} here." for one in IN_SECTION.get(name, ()) if one in options), ""
    )


def _as_python(value: str) -> str:
    """A value as it stands in a config, such as ``true``, as Python writes it."""
    if value in ("true", "false"):
        return value.capitalize()
    try:
        float(value)
    except ValueError:
        return repr(value)
    return value


def _within(name: str, taken: Collection[str]) -> Iterator[str]:
    """How an option of one of the classes of options among ``taken`` is written."""
    for outer in (found for owner in _OWNERS for found in declared(owner).values()):
        inner = [kind for kind in members(outer.type) if kind in _OWNERS]
        if outer.name in taken and inner and name in declared(inner[0]):
            yield f"{outer.name}=paceline.{inner[0].__name__}({name}=…)"
