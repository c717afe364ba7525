"""What a hostile hand does to a value, a text or a file; every choice is the random generator's."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIB = 1 << 40
_HUGE = "@@huge-number@@"
_DEEP = "@@deep@@"


def nasty_values(outside: Path, pid: int) -> list[Any]:
    """Values that no field expects; ``outside`` must not be touched, ``pid`` not be signalled."""
    return [
        None, True, False, 0, -1, 1, 7, pid, -pid, 2**31, 2**63, 2**64, 1.5, -0.0,
        float("nan"), float("inf"), float("-inf"), 1e308, _HUGE, _DEEP, "", "x", "nan", "0", "-1",
        "\x1b[31mred\x1b]0;title\x07", "\x9b2J", "a\u202eb\u2066", "\ud800", "line\nforged: whole",
        "\x00", "[bold red]markup[/]", "%s%n{0}{x}", "é日本", "A" * 100_000,
        str(outside / "victim"),
        f"../../../../../../../..{outside}/victim", "../victim", "/dev/zero", "/dev/full",
        "/etc/passwd", "file:///etc/passwd", "~/.bashrc", ".", "..", "/", "manifest.json",
        "2024-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00", [], [[]], {},
        [None], [1, 2, 3], ["x"] * 1000, {"a": {"b": []}}, {"\x1b[2J": "\x1b[2J"}, [TIB], TIB,
    ]  # fmt: skip


class Mutator:
    """Mutations for one case."""

    def __init__(self, chance: random.Random, outside: Path, pid: int) -> None:
        self.chance = chance
        self.outside = outside
        self._values = nasty_values(outside, pid)
        self.done: list[str] = []
        """What was done, for the report."""

    def value(self) -> Any:
        """One of the nasty values."""
        return copy.deepcopy(self.chance.choice(self._values))

    def mutate(self, data: Any, times: int = 1) -> Any:
        """``data`` with some value in it replaced, removed, added or exchanged."""
        for _ in range(times):
            data = self._once(data)
        return data

    def _once(self, data: Any) -> Any:
        places = list(_places(data))
        if not places or self.chance.random() < 0.03:
            self.done.append("the whole")
            return self.value()
        container, key = self.chance.choice(places)
        how = self.chance.choice(("replace", "replace", "replace", "remove", "add", "exchange"))
        self.done.append(f"{how} {key!r:.40}")
        if how == "remove":
            del container[key]
        elif how == "add" and isinstance(container, dict):
            container[str(self.value())[:1000]] = self.value()
        elif how == "add":
            container.insert(key, self.value())
        elif how == "exchange":
            other, other_key = self.chance.choice(places)
            with contextlib.suppress(RecursionError):  # what an earlier mutation has nested deeply
                container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = self.value()
        return data

    def json_text(self, data: Any) -> bytes:
        """``data`` as JSON, with what JSON can say and Python does not."""
        text = json.dumps(data, ensure_ascii=self.chance.random() < 0.5)
        text = text.replace(f'"{_HUGE}"', "9" * self.chance.choice((40, 400, 5000)))
        depth = self.chance.choice((40, 900, 100_000))
        text = text.replace(f'"{_DEEP}"', "[" * depth + "]" * depth)
        if self.chance.random() < 0.05 and text.startswith("{") and len(text) > 2:
            first = text[1:].partition(",")[0].rstrip("}")
            text = "{" + first + "," + text[1:]  # a key twice
        return text.encode("utf-8", "surrogatepass")

    def spoil(self, data: bytes) -> bytes:
        """Bytes cut, flipped, doubled, in another encoding, or of no sense at all."""
        how = self.chance.choice(
            ("cut", "flip", "double", "insert", "utf16", "bom", "nul", "empty", "noise", "deep")
        )
        self.done.append(f"bytes: {how}")
        at = self.chance.randrange(len(data) + 1)
        if how == "cut":
            return data[:at]
        if how == "flip":
            spoiled = bytearray(data)
            for _ in range(self.chance.randint(1, 8)):
                if spoiled:
                    spoiled[self.chance.randrange(len(spoiled))] ^= 1 << self.chance.randrange(8)
            return bytes(spoiled)
        if how == "insert":
            return data[:at] + self.chance.randbytes(self.chance.randint(1, 64)) + data[at:]
        return {
            "double": data + data,
            "utf16": data.decode("utf-8", "replace").encode("utf-16"),
            "bom": b"\xef\xbb\xbf" + data,
            "nul": data[:at] + b"\0" * 100 + data[at:],
            "empty": b"",
            "noise": self.chance.randbytes(300),
            "deep": b'{"a":' * 3000,
        }[how]

    def break_file(self, path: Path) -> None:
        """Put something else where a file or a folder was."""
        breaks: dict[str, Callable[[Path], None]] = {
            "gone": lambda p: None,
            "fifo": lambda p: os.mkfifo(p),
            "folder": lambda p: p.mkdir(),
            "to outside": lambda p: p.symlink_to(self.outside / "victim"),
            "to outside's folder": lambda p: p.symlink_to(self.outside),
            "to nothing": lambda p: p.symlink_to(self.outside / "made"),
            "to itself": lambda p: p.symlink_to(p.name),
            "to zeros": lambda p: p.symlink_to("/dev/zero"),
            "to a full disk": lambda p: p.symlink_to("/dev/full"),
            "sparse": _sparse,
            "socket": _socket,
            "unreadable": _unreadable,
            "empty": lambda p: p.write_bytes(b""),
        }
        how = self.chance.choice(list(breaks))
        if not path.parent.is_dir() or any(one.is_symlink() for one in path.parents):
            return  # what an earlier mutation has taken away, or put elsewhere
        self.done.append(f"{path.name}: {how}")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        breaks[how](path)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(TIB)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may be short only
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name[:90])
    finally:
        os.chdir(here)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested data, without recursion."""
    found, todo = [], [data]
    while todo:
        one = todo.pop()
        if not isinstance(one, dict | list):
            continue
        for key in list(one) if isinstance(one, dict) else range(len(one)):
            found.append((one, key))
            todo.append(one[key])
    return found
