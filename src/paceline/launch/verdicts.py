"""What the launchers of one world exchange through its round store.

Who they are (:class:`NodeHistory`), when one's ranks are done, and above all the :class:`Verdict`
on a world that ended before its time: the first launcher to reach one writes it, and all act on
that one, so that they never disagree on whether, why and when to go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.launch.endurance import Endurance
from paceline.launch.messages import BadMessage, decode, decode_text, encode
from paceline.launch.policy import Decision, Ending

_LOOK_SECONDS = 0.2
# A launcher that hosted the store may be gone without a word: then nobody is left to tell.
_ANSWER_SECONDS = 5.0
# What torch's stores raise, and those around them, when they cannot be reached.
_TROUBLES = (RuntimeError, OSError, LookupError)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Verdict:
    """Why a world ended and what follows, as said by the launcher of ``host``.

    ``rank``, ``exit_code`` and ``log`` are those of the rank to blame, if one is. ``report`` is
    what a person should read when the run is over because of it.
    """

    ending: Ending
    decision: Decision
    host: str
    rank: int | None = None
    exit_code: int | None = None
    log: str = ""
    report: str = ""

    @property
    def orderly(self) -> bool:
        """The ranks save and leave together; otherwise some are gone and the rest is in vain."""
        return self.ending.kind in ("preemption", "node_joined")

    def to_json(self) -> str:
        """As one line of text."""
        return encode(self)

    @staticmethod
    def from_json(text: str) -> Verdict:
        """What :meth:`to_json` wrote."""
        return decode(Verdict, text)


@dataclass(frozen=True)
class NodeHistory:
    """What a launcher says of itself when a world forms.

    ``starts`` counts the worlds it has been part of, ``history`` is how they ended: one that has
    just joined learns it from the others.
    """

    nproc: int
    starts: int
    history: list[Ending] = field(default_factory=list)

    def to_json(self) -> str:
        """As one line of text."""
        return encode(self)

    @staticmethod
    def from_json(text: str) -> NodeHistory:
        """What :meth:`to_json` wrote."""
        return decode(NodeHistory, text)


class Verdicts:
    """The round store as one launcher sees it; of a world of one node it needs no store at all.

    A call to a store whose host is gone may never return. So all of them are made by threads of
    their own, and what they found so far is there to be read.
    """

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        self._store = store
        self._node = node
        self._nodes = nodes
        self._found: Verdict | None = None
        self._done: set[int] = set()
        self._waited_for: frozenset[int] = frozenset()
        self._closed = threading.Event()

    def exchange(self, member: NodeHistory) -> list[NodeHistory]:
        """Tell the others of this launcher, and hear of them all; by node. Waits for them."""
        if self._nodes == 1:
            return [member]
        self._store.set(f"member/{self._node}", member.to_json())
        told = self._store.multi_get([f"member/{node}" for node in range(self._nodes)])
        return [NodeHistory.from_json(decode_text(text)) for text in told]

    def watch(self, waited_for: Sequence[int]) -> None:
        """Look from now on for a verdict, and for the nodes ``waited_for`` to be done."""
        self._waited_for = frozenset(waited_for)
        if self._nodes > 1:
            # A connection of its own: one request at a time goes over each.
            args = (self._store.clone(),)
            threading.Thread(target=self._look, args=args, name="verdicts", daemon=True).start()

    def found(self) -> Verdict | None:
        """The verdict on this world, once there is one."""
        return self._found

    def reach(self, verdict: Verdict) -> Verdict:
        """Write down a verdict unless there is one; returns the one that counts."""
        if self._nodes > 1 and self._found is None:
            text = verdict.to_json()
            counts = self._ask(lambda: self._store.compare_set("verdict", "", text))
            with contextlib.suppress(BadMessage):  # nobody's verdict: ours counts
                said = text if counts is None else decode_text(counts)
                self._found = verdict if said == text else Verdict.from_json(said)
        self._found = self._found or verdict
        return self._found

    def say_done(self) -> None:
        """The ranks of this node have left with success."""
        if self._node not in self._done:
            self._done.add(self._node)
            if self._nodes > 1:
                self._ask(lambda: self._store.set(f"done/{self._node}", ""))

    def all_done(self) -> bool:
        """Whether the ranks of all nodes that have any have left with success."""
        return bool(self._waited_for) and self._waited_for <= self._done

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _ask(self, request: Callable[[], _T]) -> _T | None:
        """The answer to a request, ``None`` when there is none in time."""
        answers: list[_T] = []

        def ask() -> None:
            with contextlib.suppress(*_TROUBLES):
                answers.append(request())

        thread = threading.Thread(target=ask, name="verdict", daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        return answers[0] if answers else None

    def _look(self, store: Any) -> None:
        endurance = Endurance("the look for verdicts")
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                with endurance.turn("a verdict that cannot be read", but=_TROUBLES):
                    if self._found is None and store.check(["verdict"]):
                        self._found = Verdict.from_json(decode_text(store.get("verdict")))
                for node in self._waited_for - self._done:
                    if store.check([f"done/{node}"]):
                        self._done.add(node)
            except _TROUBLES:  # its host is gone: whoever misses it will see to that
                return
