"""Messages to the stores: each kind that a launcher, a rank or a doctor reads, and what reads it.

A reader may refuse a message (``BadMessage``, or an error of Paceline's that says what is wrong);
what it takes goes through everything that is made of it: worlds, events, logs, texts.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from fuzzing.mutations import Mutator
from paceline.diagnose.hangs.coordinator import Coordinator
from paceline.diagnose.hangs.diagnosis import diagnose_hang
from paceline.diagnose.hangs.mismatch import digest
from paceline.diagnose.hangs.rank_heartbeat import (
    Call,
    Frame,
    GroupProgress,
    Heartbeat,
    PointToPoint,
    RankReport,
)
from paceline.doctor.multi_node import LinkReport, MachineCard
from paceline.errors import PacelineError
from paceline.events import Event, EventLog, Note, StepDone
from paceline.events.wording import moving_again
from paceline.launch.logs import LogName
from paceline.launch.messages import BadMessage, decode
from paceline.launch.outcome import WorldOutcome
from paceline.launch.rendezvous import forwarding, membership, node_heartbeats
from paceline.launch.rendezvous.records import CurrentWorld
from paceline.launch.rendezvous.torch_state import JsonBackend, RendezvousNode, RendezvousState
from paceline.launch.restart_policy import Decision, Ending
from paceline.track.progress import Progress

_TIMES = 8
_RANKS = 3


def message_case(hand: Mutator, box: Path) -> tuple[list[str], Callable[[], Any]]:
    """A few hostile messages of one kind, and a call that has them read."""
    kind = hand.chance.choice(sorted(_KINDS))
    sound, read = _KINDS[kind]
    texts = [_hostile(hand, sound()) for _ in range(_TIMES)]

    def call() -> None:
        for text in texts:
            try:
                read(text, box)
            except (BadMessage, PacelineError) as error:
                print(ascii(str(error)[:200]))

    return [f"(messages: {kind})"], call


def _hostile(hand: Mutator, sound: Any) -> bytes:
    if hand.chance.random() < 0.15:
        return hand.spoil(json.dumps(sound).encode())
    return hand.json_text(hand.mutate(json.loads(json.dumps(sound)), hand.chance.randint(1, 3)))


class _Line:
    """A line to a store that is here."""

    def __init__(self) -> None:
        self.store = HashStore()

    def call(self, request: Callable[[Any], Any]) -> Any:
        return request(self.store)


def _news(text: bytes, box: Path) -> None:
    log = EventLog(box / "run")

    def keep(name: LogName, host: str, data: bytes) -> None:
        path = name.path(box / "run" / "logs", host)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)

    forwarder = forwarding.EventForwarder(log.write, keep, notice=lambda said: None)
    forwarder.new_round(["alpha", "../../outside/x"], 0)
    line = _Line()
    number = line.store.add("forwarded/count", 1)
    line.store.set(f"forwarded/{number}", text)
    forwarder.exchange(line, is_main=True)  # type: ignore[arg-type]
    log.close()
    _show(text)


def _show(text: bytes) -> None:
    """The event in a piece of news, as the progress of node 0 shows it."""
    try:
        event = Event.from_json(decode(forwarding.ForwardedEvent, text).event)
    except BadMessage:
        return
    if event is not None:
        Progress().handle(event)


def _member(text: bytes, box: Path) -> None:
    own = _sound_member()
    found = membership.NodeMember.from_json(text)
    world = membership.agree([membership.NodeMember.from_json(json.dumps(own)), found])
    membership.gone(world), membership.joined(world), world.hosts
    membership.different(*world.members[:2])


def _outcome(text: bytes, box: Path) -> None:
    outcome = WorldOutcome.from_json(text.decode(errors="replace"))
    log = EventLog(box / "run")
    for event in outcome.events():
        log.write(event)
        Progress().handle(event)
    log.close()
    str(outcome.to_error()), outcome.restart_notice(), outcome.orderly


def _signs_of_life(text: bytes, box: Path) -> None:
    """Each key that a look reads, in turn, holds the text."""
    for key in (
        "alive/1",
        "left/1",
        "over",
        "waiting",
        node_heartbeats.OVER,
        node_heartbeats.WAITING,
    ):
        store = HashStore()
        node_heartbeats.prepare_store(store, 2)
        store.set(key, text)
        try:
            seen = node_heartbeats.beat_and_read(store, 0, 2)
        except BadMessage:
            continue
        beats = node_heartbeats.HeartbeatTracker(2, 0, 5.0, 0.0)
        beats.note(seen.counts, 1.0)
        beats.silent(100.0)


class _Board:
    """What ranks have posted, some of it by a stranger."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        self._texts = texts

    def beats(self, ranks: Any) -> dict[int, Heartbeat]:
        return self._taken(Heartbeat, "beat", ranks)

    def reports(self, question: int, ranks: Any) -> dict[int, RankReport]:
        return self._taken(RankReport, "report", ranks)

    def digests(self, ranks: Any) -> dict[int, str]:
        return {rank: self._texts["digest"].decode(errors="replace") for rank in ranks}

    def ask(self) -> int:
        return 1

    def answered(self, question: int, ranks: Any) -> set[int]:
        return set(ranks)

    def _taken(self, kind: Any, name: str, ranks: Any) -> dict[int, Any]:
        try:
            found = decode(kind, self._texts[name])
        except BadMessage:
            return {}
        return {rank: dataclasses.replace(found, rank=rank) for rank in ranks}


def _hang(text: bytes, box: Path) -> None:
    """The same text as a beat, a report and a digest: whichever it is, all is gone through."""
    sound = {"beat": _sound_beat(), "report": _sound_report(), "digest": _sound_digest()}
    for name in sound:
        texts = {key: json.dumps(value).encode() for key, value in sound.items()} | {name: text}
        board = _Board(texts)
        coordinator = Coordinator(board, _RANKS, tell=lambda news: None)  # type: ignore[arg-type]
        for _ in range(3):
            coordinator.tick()
        reports = board.reports(1, range(_RANKS))
        if reports and (finding := diagnose_hang(reports, 1.0)) is not None:
            moving_again(finding.seconds)
            Progress().handle(Note(message=finding.detail))


def _rendezvous(text: bytes, box: Path) -> None:
    store = HashStore()
    backend = JsonBackend(store, "x", lambda said: None)
    store.set("rendezvous/x", text)
    backend.get_state()


def _of_kind(kind: Any) -> Callable[[bytes, Path], None]:
    def read(text: bytes, box: Path) -> None:
        decode(kind, text)

    return read


def _sound_member() -> Any:
    run = membership.RunInfo("/runs/x", "abc", ("/runs/x/checkpoints",))
    return asdict(
        membership.NodeMember(
            "id", "alpha", "10.0.0.1", 2, 1, {"layout": "dp=2"}, 1, 0, run, {"id": "a"}
        )
    )


def _sound_outcome() -> Any:
    ending, decision = Ending("failure", "E: no", 3), Decision(True, 1.0, "failure", 1, 3)
    return asdict(WorldOutcome(ending, decision, "alpha", 1, 1, "/logs/rank1.log", "report"))


def _sound_report() -> Any:
    call = Call("gloo", "0", (0, 1, 2), 7, "all_reduce", ((4,),), ("float32",), False)
    place = GroupProgress("gloo", "0", (0, 1, 2), 7, 6)
    frame = Frame("train.py", 12, "work", "loss.backward()")
    return asdict(
        RankReport(
            1, host="alpha", pid=2, step=4, seconds=60.0, paced=True, groups=(place,),
            calls=(call,), message=PointToPoint("send", 2), stack=(frame,),
        )
    )  # fmt: skip


def _sound_beat() -> Any:
    place = GroupProgress("gloo", "0", (0, 1, 2), 7, 6)
    return asdict(
        Heartbeat(1, (0, 1), 9, "alpha", 2, 0.001, 60.0, 3, 4, paced=True, groups=(place,))
    )


def _sound_digest() -> Any:
    call = Call("gloo", "0", (0, 1, 2), 7, "all_reduce", ((4,),), ("float32",))
    return json.loads(digest([call], {}))


def _sound_news() -> Any:
    step = StepDone(step=1, epoch=0, loss=1.0, lr=0.1, samples=8, seconds=0.1)
    return asdict(forwarding.ForwardedEvent(step.to_json(), "id"))


def _sound_log() -> Any:
    data = base64.b64encode(b"hello\n").decode()
    return asdict(forwarding.LogPiece(LogName(1, 2), 1, data))


def _sound_state() -> Any:
    node = RendezvousNode("alpha", 2, 0)
    return asdict(RendezvousState(1, False, 5, False, [(node, 0)], [node], [], [(node, 5)]))


def _sound_current() -> Any:
    run = membership.RunInfo("/runs/x", "abc")
    return asdict(CurrentWorld("w", 1, 1, ["alpha"], {"layout": "dp=2"}, run))


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[bytes, Path], None]]] = {
    "news": (_sound_news, _news),
    "log": (_sound_log, _news),
    "member": (_sound_member, _member),
    "outcome": (_sound_outcome, _outcome),
    "life": (lambda: {"a": "b"}, _signs_of_life),
    "beat": (_sound_beat, _hang),
    "report": (_sound_report, _hang),
    "digest": (_sound_digest, _hang),
    "rendezvous": (_sound_state, _rendezvous),
    "world": (_sound_current, _of_kind(CurrentWorld)),
    "card": (
        lambda: asdict(MachineCard("alpha", "10.0.0.1", "", 5, "0a1b2c3d")),
        _of_kind(MachineCard),
    ),
    "links": (lambda: asdict(LinkReport([], [])), _of_kind(LinkReport)),
}
