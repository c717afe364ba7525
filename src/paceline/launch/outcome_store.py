"""What the launchers of one world exchange through its round store.

Their history (``NodeHistory``), whose ranks are done, and above all the
``WorldOutcome`` of a world that ended before its time: the first
launcher to reach one writes it, and all act on that one, so that they never disagree on whether,
why and when to go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.launch.background_errors import BackgroundErrors
from paceline.launch.messages import BadMessage, decode, decode_text, encode
from paceline.launch.outcome import WorldOutcome
from paceline.launch.restart_policy import Ending

_OUTCOME = "outcome"
_LOOK_SECONDS = 0.2
# The launcher that served the store may be gone: then there is nobody left to answer.
_ANSWER_SECONDS = 5.0
# What torch's stores raise, and those around them, when they cannot be reached.
_TROUBLES = (RuntimeError, OSError, LookupError)
_T = TypeVar("_T")


@dataclass(frozen=True)
class NodeHistory:
    """What a launcher has been through, as it reports it when a world forms.

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
        """What ``to_json`` wrote."""
        return decode(NodeHistory, text)


class OutcomeStore:
    """The round store as one launcher sees it; a world of one node needs no store at all.

    A call to a store whose host is gone may never return. So all of them are made by threads of
    their own, and what they have found so far can be read here.
    """

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        self._store = store
        self._node = node
        self._nodes = nodes
        self._outcome: WorldOutcome | None = None
        self._done: set[int] = set()
        self._waited_for: frozenset[int] = frozenset()
        self._closed = threading.Event()

    def exchange(self, member: NodeHistory) -> list[NodeHistory]:
        """Send the history of this launcher, and wait for those of all; returned by node."""
        if self._nodes == 1:
            return [member]
        self._store.set(f"member/{self._node}", member.to_json())
        texts = self._store.multi_get([f"member/{node}" for node in range(self._nodes)])
        return [NodeHistory.from_json(decode_text(text)) for text in texts]

    def watch(self, waited_for: Sequence[int]) -> None:
        """Start to look for an outcome, and for the nodes ``waited_for`` to be done."""
        self._waited_for = frozenset(waited_for)
        if self._nodes > 1:
            # A connection of its own: one request at a time goes over each.
            args = (self._store.clone(),)
            threading.Thread(target=self._look, args=args, name="outcomes", daemon=True).start()

    def outcome(self) -> WorldOutcome | None:
        """The outcome of this world, once there is one."""
        return self._outcome

    def agree(self, outcome: WorldOutcome) -> WorldOutcome:
        """Publish an outcome unless there is one already; returns the one that counts."""
        if self._nodes > 1 and self._outcome is None:
            text = outcome.to_json()
            counts = self._call(lambda store: store.compare_set(_OUTCOME, "", text))
            with contextlib.suppress(BadMessage):  # not an outcome: ours counts
                said = text if counts is None else decode_text(counts)
                self._outcome = outcome if said == text else WorldOutcome.from_json(said)
        self._outcome = self._outcome or outcome
        return self._outcome

    def mark_done(self) -> None:
        """Report that the ranks of this node have left with success; repeat it until it is known.

        The others wait for it: a report that did not get through is none.
        """
        if self._node in self._done:
            return
        if self._nodes == 1 or self._call(lambda store: _set_done(store, self._node)):
            self._done.add(self._node)

    def mark_all_done(self) -> None:
        """Another node knows that the ranks of all nodes have left with success."""
        self._done.update(self._waited_for)

    def all_done(self) -> bool:
        """Whether the ranks of all nodes that have any have left with success."""
        return bool(self._waited_for) and self._waited_for <= self._done

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _call(self, request: Callable[[Any], _T]) -> _T | None:
        """The answer to a request, ``None`` when there is none in time.

        A connection that once gave no answer is dead, so the second try is made over a new one.
        """
        answers: list[_T] = []

        def call() -> None:
            try:
                answers.append(request(self._store))
            except _TROUBLES:
                with contextlib.suppress(*_TROUBLES):
                    answers.append(request(self._store.clone()))

        thread = threading.Thread(target=call, name="outcome", daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        return answers[0] if answers else None

    def _look(self, store: Any) -> None:
        errors = BackgroundErrors("the watch for outcomes")
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                # A busy host may answer too late once. One that is gone is missed by others.
                store = self._store.clone() if store is None else store
                with errors.reported("an outcome that cannot be read", but=_TROUBLES):
                    if self._outcome is None and store.check([_OUTCOME]):
                        self._outcome = WorldOutcome.from_json(decode_text(store.get(_OUTCOME)))
                for node in self._waited_for - self._done:
                    if store.check([f"done/{node}"]):
                        self._done.add(node)
            except _TROUBLES:
                store = None


def _set_done(store: Any, node: int) -> bool:
    store.set(f"done/{node}", "")
    return True
