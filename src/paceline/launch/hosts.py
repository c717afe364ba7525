"""Hosts that a person names: ``node0:4,user@node1:4``, or a file with one on each line.

Read are the forms that horovodrun (``host slots=4``, ``host:4``), Open MPI (``host slots=4
max_slots=8``) and MPICH (``host:4``) read, and ``ssh://user@host:2222`` for another port. What is
returned can stand on a command line: a name has letters, digits, dots, dashes and underscores, and
never begins with a dash.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.config.running import Launch
from paceline.errors import ConfigError
from paceline.untrusted import read_text

MOST_HOSTS = 4096
_MOST_BYTES = 1 << 20
_MOST_SLOTS = 4096
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,127}")
_SLOTS = ("slots", "slot", "count", "cpus", "cpu")
_MOST = ("max_slots", "max-slots", "slots_max")
_FORM = "write HOST, USER@HOST, HOST:4 for 4 ranks, or ssh://USER@HOST:2222"


@dataclass(frozen=True)
class HostSlots:
    """A host, how to get there, and how many ranks it is to have (``None``: not said)."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        """As it is shown: user and host, the port where it is not ssh's own."""
        shown = f"[{self.name}]" if ":" in self.name and self.port else self.name
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{shown}" + ("" if self.port is None else f":{self.port}")


def parse_host(text: str) -> HostSlots:
    """One host, as it stands in a list or on a line of a file; ``ValueError`` where it is none."""
    first, *words = text.split()[:20] or [""]
    found = _address(first)
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lower()
        if equals and key in _SLOTS:
            if found.slots is not None:
                raise ValueError(f"{text!r} gives the number of its slots twice")
            found = dataclasses.replace(found, slots=_number(value, word, _MOST_SLOTS))
        elif equals and key == "user" and found.user is None:
            found = dataclasses.replace(found, user=_checked_user(value, text))
        elif equals and key in _MOST:
            if _number(value, word, 1 << 31) < (found.slots or 1):
                raise ValueError(f"{text!r} has more slots than {word} allows")
        else:
            raise ValueError(f"{text!r}: {word!r} is not known here; use slots=4, max_slots=4")
    return found


def parse_hosts(items: Iterable[str]) -> list[HostSlots]:
    """The hosts of a list, each named once."""
    found = [parse_host(item) for item in items]
    _check_count(found)
    names = [(host.name, host.port) for host in found]
    for host, place in zip(found, names, strict=True):
        if names.count(place) > 1:
            raise ValueError(f"{host} is named twice; name it once, as {host.name}:SLOTS")
    return found


def read_hostfile(path: str | os.PathLike[str]) -> list[HostSlots]:
    """The hosts of a file, in order; ``#`` begins a comment.

    The slots of a host that has several lines add up, as mpirun has it; a line without a number
    then counts as one. Raises ``ValueError`` for a line that is none, ``OSError`` for no file.
    """
    found: dict[tuple[str, int | None], HostSlots] = {}
    for number, line in enumerate(read_text(path, _MOST_BYTES).splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            host = parse_host(entry)
            place = (host.name, host.port)
            if (before := found.get(place)) is not None:
                if before.user != host.user:
                    raise ValueError(f"{host.name} has two users, {before.user} and {host.user}")
                host = dataclasses.replace(host, slots=(before.slots or 1) + (host.slots or 1))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        found[place] = host
    hosts = list(found.values())
    _check_count(hosts)
    return hosts


def hosts_of_section(key: str, hosts: Sequence[str], hostfile: str | None) -> list[HostSlots]:
    """The hosts that a section of the config names, ``key`` being its name; none where it does not.

    Raises ``ConfigError`` where it names them twice, or wrongly.
    """
    if hosts and hostfile is not None:
        raise ConfigError(f"{key}.hosts and {key}.hostfile both name hosts; leave one of them out")
    if hostfile is None and not hosts:
        return []
    try:
        return (
            parse_hosts(hosts) if hostfile is None else read_hostfile(os.path.expanduser(hostfile))
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{key}.hostfile={hostfile!r} cannot be read: {why}") from None
    except ValueError as error:
        where = f"{key}.hosts" if hostfile is None else f"{key}.hostfile={hostfile!r}"
        raise ConfigError(f"{where}: {error}") from None


def implied_by(hosts: Sequence[HostSlots], launch: Launch) -> dict[str, str]:
    """The number of machines and of their ranks, where hosts say it and the config does not."""
    if not hosts:
        return {}
    implied = {}
    if "nnodes" not in launch.model_fields_set:
        implied["launch.nnodes"] = str(len(hosts))
    if launch.nproc == "auto" and (slots := common_slots(hosts)) is not None:
        implied["launch.nproc"] = str(slots)
    return implied


def common_slots(hosts: Iterable[HostSlots]) -> int | None:
    """The number of slots that all hosts have, ``None`` where none says; else ``ValueError``."""
    by_slots: dict[int | None, list[str]] = {}
    for host in hosts:
        by_slots.setdefault(host.slots, []).append(str(host))
    if len(by_slots) > 1:
        said = "; ".join(
            f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: "
            f"{'no number' if slots is None else slots}"
            for slots, names in by_slots.items()
        )
        raise ValueError(f"all hosts must have the same number of slots ({said})")
    return next(iter(by_slots), None)


def _check_count(hosts: list[HostSlots]) -> None:
    if not hosts:
        raise ValueError("names no host")
    if len(hosts) > MOST_HOSTS:
        raise ValueError(f"names {len(hosts)} hosts; at most {MOST_HOSTS} can be used")


def _address(text: str) -> HostSlots:
    """``[ssh://][user@]host[:number]``; the number is a port behind ``ssh://``, else slots."""
    is_url = text.lower().startswith("ssh://")
    rest = text[len("ssh://") :].removesuffix("/") if is_url else text
    user, at, place = rest.rpartition("@")
    name, number = _split(place, text)
    host = HostSlots(_checked_name(name, text), _checked_user(user, text) if at else None)
    if number is None:
        return host
    if is_url:
        return dataclasses.replace(host, port=_number(number, text, 65535))
    return dataclasses.replace(host, slots=_number(number, text, _MOST_SLOTS))


def _split(place: str, text: str) -> tuple[str, str | None]:
    """The name and the number behind it; an IPv6 address with a number stands in brackets."""
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is no host; write [ADDRESS]:4 for an IPv6 address")
        return name, rest[1:] if rest else None
    if place.count(":") > 1:
        return place, None
    name, colon, number = place.partition(":")
    return name, number if colon else None


def _checked_name(name: str, text: str) -> str:
    if ":" in name:
        address, percent, zone = name.partition("%")
        if percent and not _NAME.fullmatch(zone):
            raise ValueError(f"{text!r} is no host; {_FORM}")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise ValueError(f"{text!r} is no host: {name!r} is no IPv6 address; {_FORM}") from None
        return name
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no host; {_FORM}")
    return name


def _checked_user(user: str, text: str) -> str:
    if not _USER.fullmatch(user):
        raise ValueError(f"{text!r}: {user!r} cannot be the name of a user")
    return user


def _number(value: str, text: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", value) or not 1 <= int(value) <= most:
        raise ValueError(f"{text!r}: {value!r} must be a number from 1 to {most}")
    return int(value)
