"""Where ranks leave heartbeats and reports: a corner of the TCP store that their world joined at.

Each thread that uses it has a connection of its own: a store's client serves one call at a time,
and the training thread must never wait for the watch. Nothing here waits for long: a store that is
slow or gone raises ``StoreGone``, and the caller gives up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.diagnose.hangs.rank_heartbeat import Heartbeat, RankReport
from paceline.launch.messages import BadMessage, decode, encode

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=5)
_PREFIX = "paceline/watch"


class StoreGone(Exception):
    """The store cannot be reached, or not in time."""


class HeartbeatStore:
    """A connection to the store at ``address:port``."""

    def __init__(self, address: str, port: int) -> None:
        try:
            client = TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise StoreGone(str(error)) from error
        self._store = PrefixStore(_PREFIX, client)
        self._seen: set[str] = set()

    # Heartbeats.

    def post_beat(self, beat: Heartbeat) -> None:
        """Leave a heartbeat."""
        self._set(f"beat/{beat.rank}", beat.to_json())

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """The latest heartbeat of each rank that ever left one."""
        texts = self._read({rank: f"beat/{rank}" for rank in ranks})
        return {rank: beat for rank, beat in _decoded(Heartbeat, texts) if beat.rank == rank}

    # What ranks called, for comparison.

    def post_digest(self, rank: int, text: str) -> None:
        """Leave a digest of recent collectives."""
        self._set(f"digest/{rank}", text)

    def digests(self, ranks: Iterable[int]) -> dict[int, str]:
        """The latest digest of each rank."""
        texts = self._read({rank: f"digest/{rank}" for rank in ranks})
        return {rank: text.decode(errors="replace") for rank, text in texts.items()}

    # Questions and answers.

    def ask(self) -> int:
        """Ask every rank for a report; returns the number of the question."""
        return self._add("asked", 1)

    def asked(self) -> int:
        """The number of the latest question."""
        return self._add("asked", 0)

    def answer(self, question: int, report: RankReport) -> None:
        """Post a report."""
        self._set(f"report/{question}/{report.rank}", report.to_json())

    def answered(self, question: int, ranks: Iterable[int]) -> set[int]:
        """Which of these ranks have been reported on."""
        keys = {rank: f"report/{question}/{rank}" for rank in ranks}
        return {rank for rank, key in keys.items() if self._has(key)}

    def reports(self, question: int, ranks: Iterable[int]) -> dict[int, RankReport]:
        """The reports there are."""
        texts = self._read({rank: f"report/{question}/{rank}" for rank in ranks})
        return {rank: report for rank, report in _decoded(RankReport, texts) if report.rank == rank}

    # Who leads: asks for reports, diagnoses and reports what it found.

    def claim_lead(self, term: int) -> bool:
        """Whether this is the first to claim the lead in that ``term``."""
        return self._add(f"lead/{term}", 1) == 1

    def show_lead(self, term: int, count: int) -> None:
        """The leader of ``term`` is alive."""
        self._set("leader", encode([term, count]))

    def leader(self) -> tuple[int, int]:
        """Term and count that the leader showed last; (0, 0) before the first."""
        text = self._read({0: "leader"}).get(0)
        try:
            return (0, 0) if text is None else decode(tuple[int, int], text)
        except BadMessage:
            return 0, 0

    # The store.

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise StoreGone(str(error)) from error

    def _add(self, key: str, amount: int) -> int:
        try:
            return int(self._store.add(key, amount))
        except RuntimeError as error:
            raise StoreGone(str(error)) from error

    def _has(self, key: str) -> bool:
        if key not in self._seen:
            try:
                if not self._store.check([key]):
                    return False
            except RuntimeError as error:
                raise StoreGone(str(error)) from error
            self._seen.add(key)  # keys are never deleted: asked once, known for ever
        return True

    def _read(self, keys: dict[int, str]) -> dict[int, bytes]:
        """The values of those keys that exist; a store would wait for the others."""
        there = {number: key for number, key in keys.items() if self._has(key)}
        if not there:
            return {}
        try:
            values = self._store.multi_get(list(there.values()))
        except RuntimeError as error:
            raise StoreGone(str(error)) from error
        return {number: bytes(value) for number, value in zip(there, values, strict=True)}


def _decoded(kind: type[T], texts: dict[int, bytes]) -> Iterator[tuple[int, T]]:
    """Those messages that can be read; the others are left out."""
    for number, text in texts.items():
        with contextlib.suppress(BadMessage):
            yield number, decode(kind, text)
