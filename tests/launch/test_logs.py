"""Logs by rank and attempt, and rank 0's output on the console."""

from __future__ import annotations

from pathlib import Path

from paceline.launch.logs import Relay, attempt_folder, next_attempt


def test_no_attempt_writes_over_an_earlier_one(tmp_path: Path) -> None:
    for attempt in range(3):
        assert next_attempt(tmp_path) == attempt
        folder = attempt_folder(tmp_path, attempt)
        folder.mkdir(exist_ok=True)
        (folder / "rank0.log").touch()
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.log"))
    assert names == ["attempt1/rank0.log", "attempt2/rank0.log", "rank0.log"]


def test_relay_passes_on_everything_up_to_the_quiet_point(tmp_path: Path) -> None:
    shown: list[str] = []
    log, quiet = tmp_path / "rank0.log", tmp_path / "quiet"
    log.write_bytes("first é".encode()[:-1])  # cut in the middle of a character
    relay = Relay(shown.append)
    relay.follow(log, quiet)
    with open(log, "ab") as file:
        file.write("é".encode()[1:] + b" second\n")
        file.flush()
        (tmp_path / "part").write_text(str(log.stat().st_size))
        (tmp_path / "part").rename(quiet)
        file.write(b"Traceback that the launcher shows itself\n")
    relay.finish()
    assert "".join(shown) == "first é second\n"


def test_relay_goes_from_attempt_to_attempt(tmp_path: Path) -> None:
    shown: list[str] = []
    relay = Relay(shown.append)
    for attempt in range(3):
        log = tmp_path / f"{attempt}.log"
        log.write_text(f"attempt {attempt}\n")
        relay.follow(log, tmp_path / "none")
    relay.finish()
    assert "".join(shown) == "attempt 0\nattempt 1\nattempt 2\n"


def test_a_closed_console_ends_the_relay_quietly(tmp_path: Path) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    log = tmp_path / "rank0.log"
    log.write_text("hello\n")
    relay = Relay(closed)
    relay.follow(log, tmp_path / "none")
    relay.finish()
