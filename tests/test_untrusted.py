"""Reading and showing what others wrote."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from paceline.track.console import SafeConsole
from paceline.untrusted import (
    NotReadable,
    open_file,
    parse_json,
    printable,
    read_bytes,
    read_lines,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本 🎉", "plain é 日本 🎉"),
        ("two\nlines\tof it", "two\nlines\tof it"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J\x7f\x00\r", "\\x9b2J\\x7f\\x00\\r"),
        ("exe\u202ecod.txt\u2066", "exe\\u202ecod.txt\\u2066"),
        ("\ud800", "\\ud800"),
        ("a\u2028b\u200b", "a\\u2028b\\u200b"),
        ("1\u00a0000", "1\u00a0000"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()  # no surrogate is left


def test_a_name_cannot_forge_a_line() -> None:
    assert printable("a\nwhole: b\t", one_line=True) == "a\\nwhole: b\\t"


def test_rich_neither_steers_the_terminal_nor_reads_markup() -> None:
    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True, width=200)
    console.print("[bold red]\x1b]0;title :smile: \x9b[/bold]")
    assert screen.getvalue() == "[bold red]\\x1b]0;title :smile: \\x9b[/bold]\n"


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path, says in (
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(NotReadable, match=says) as raised:
            open_file(path)
        assert raised.value.filename == str(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path / "loop")


def test_no_more_is_read_than_such_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_bytes(path, 4) == b"1234"
    with pytest.raises(NotReadable, match="4 bytes; a file of this kind has at most 3"):
        read_text(path, 3)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        NotReadable,
        match=r"^it has 1,099,511,627,776 bytes; a file of this kind has at most 1,048,576 bytes$",
    ):
        read_bytes(path, 1 << 20)


def test_lines_that_are_too_long_are_told_apart() -> None:
    file = io.BytesIO(b"one\n" + b"x" * (3 << 20) + b"\ntwo\n\nthree")
    assert list(read_lines(file, 1000)) == [b"one", None, b"two", b"", b"three"]
    assert list(read_lines(io.BytesIO(b"y" * 5000), 1000)) == [None]
    assert list(read_lines(io.BytesIO(b""), 10)) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("9" * 5000, "integer string conversion"),
        ("{", "Expecting"),
        (b"{\xff\xff", "decode"),
    ],
)
def test_traps_of_json_are_value_errors(text: str | bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text)
