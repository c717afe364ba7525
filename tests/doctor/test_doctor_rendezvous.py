"""Doctors that meet: several seats in one process, at one store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.doctor.rendezvous import DoctorRendezvous, RendezvousFailed, RendezvousLost
from ports import free_port


def a_doctor(host: str, port: int, keys: dict[str, str]) -> str:
    return "doctor"


def sit(port: int, wait: float = 60) -> DoctorRendezvous:
    return DoctorRendezvous("127.0.0.1", port, wait, a_doctor)


def all_at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(job) for job in jobs]]


def test_all_machines_learn_the_same() -> None:
    port = free_port()
    seats = [sit(port) for _ in range(3)]
    assert [seat.serves for seat in seats] == [True, False, False]
    cards = all_at_once([lambda s=seat: s.gather({"n": s.number}, 3) for seat in seats])
    assert cards == [{0: {"n": 0}, 1: {"n": 1}, 2: {"n": 2}}] * 3
    told = all_at_once([lambda s=seat: s.exchange("facts", s.number * 10) for seat in seats])
    assert told == [{0: 0, 1: 10, 2: 20}] * 3
    all_at_once([seat.leave for seat in seats])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_who_does_not_come_is_not_waited_for_without_end() -> None:
    port = free_port()
    first, second = sit(port, wait=1), sit(port, wait=1)
    one, two = all_at_once([lambda: first.gather({}, 3), lambda: second.gather({}, 3)])
    assert list(one) == list(two) == [0, 1]
    late = sit(port, wait=1)
    with pytest.raises(RendezvousFailed) as error:
        late.gather({}, 3)
    assert error.value.place == "too late"
    late.close()
    all_at_once([first.leave, second.leave])


def test_machine_that_leaves_is_named_and_the_others_go_on() -> None:
    port = free_port()
    seats = [sit(port) for _ in range(3)]
    all_at_once([lambda s=seat: s.gather({}, 3) for seat in seats])
    seats[1].leave(early=True)
    staying = [seats[0], seats[2]]
    begin = time.monotonic()
    told = all_at_once([lambda s=seat: s.exchange("links", 1) for seat in staying])
    assert told == [{0: 1, 2: 1}] * 2
    assert [seat.left for seat in staying] == [{1: "links"}] * 2
    assert time.monotonic() - begin < 30  # not the whole time limit of a phase
    assert (
        all_at_once([lambda s=seat: s.exchange("next", 2) for seat in staying])
        == [{0: 2, 2: 2}] * 2
    )
    all_at_once([seat.leave for seat in staying])


def test_silent_machine_is_given_up_on() -> None:
    port = free_port()
    seats = [sit(port) for _ in range(2)]
    all_at_once([lambda s=seat: s.gather({}, 2) for seat in seats])
    assert seats[0].exchange("links", 1, timeout=0.3) == {0: 1}
    assert seats[0].left == {1: "links"}
    seats[1].close()
    seats[0].leave()


def test_end_of_the_serving_machine_is_noticed() -> None:
    port = free_port()
    seats = [sit(port) for _ in range(2)]
    all_at_once([lambda s=seat: s.gather({}, 2) for seat in seats])
    seats[0].close()
    with pytest.raises(RendezvousLost):
        seats[1].exchange("links", 1)
    seats[1].close()


def test_nobody_listens() -> None:
    with pytest.raises(RendezvousFailed) as error:
        # An address of this network that is not ours to serve at; nobody refuses for it either.
        DoctorRendezvous("no-such-machine.invalid", 29400, 0.1, a_doctor)
    assert error.value.place == "unresolved"


@pytest.mark.parametrize(
    ("found", "words"), [("", "something else"), ("run", "a run's rendezvous")]
)
def test_port_that_is_taken(found: str, words: str) -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousFailed) as error:
            DoctorRendezvous("127.0.0.1", port, 1, lambda host, port, keys: found)
    assert error.value.place == "taken"
    assert words in error.value.detail


def test_comes_before_the_machine_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is started first waits for the machine that HOST names."""
    port = free_port()
    here = threading.local()
    monkeypatch.setattr(
        "paceline.doctor.rendezvous.is_this_machine", lambda host: getattr(here, "serves", True)
    )
    seats: list[DoctorRendezvous] = []

    def come_early() -> None:
        here.serves = False
        seats.append(sit(port))

    early = threading.Thread(target=come_early)
    early.start()
    time.sleep(0.7)
    server = sit(port)
    early.join(60)
    assert [seat.serves for seat in seats] == [False]
    all_at_once([lambda s=seat: s.gather({}, 2) for seat in (server, *seats)])
    all_at_once([seat.leave for seat in (server, *seats)])
