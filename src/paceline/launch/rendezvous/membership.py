"""What launchers report of themselves when a world forms, and the membership that follows from it.

Pure: no store here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import LaunchError
from paceline.launch.listening import is_loopback
from paceline.launch.messages import decode, encode

_IDENTITY = re.compile(r"[0-9a-z]{1,64}")


@dataclass(frozen=True)
class RunInfo:
    """The run that launchers work on: its folder, and its unique identity.

    ``identity`` becomes part of a file's name, so it has letters and digits only. ``path`` and
    ``checkpoint_folders`` are what the launcher that made the run reports: others compare them
    with the folders that they were asked for themselves, and never write to any other.

    Every machine must find the run's mark in ``checkpoint_folders``, because all of them write
    checkpoints there. ``resume``: the run continues from what is there.
    """

    path: str
    identity: str
    checkpoint_folders: tuple[str, ...] = ()
    resume: bool = False

    def __post_init__(self) -> None:
        if not _IDENTITY.fullmatch(self.identity):
            raise ValueError(f"no identity of a run: {self.identity[:80]!r}")


@dataclass(frozen=True)
class NodeMember:
    """What a launcher reports of itself when a world forms.

    ``asked`` is what it was asked to run, by key: all launchers must agree on it. ``round`` and
    ``node`` are the world it was last part of and its place there (-1: none), ``run`` what it
    worked on then, ``peers`` the ids and hosts of that world. ``rendezvous_address`` is where it
    reached the rendezvous store, ``serves_rendezvous`` whether it serves that itself.
    """

    id: str
    host: str
    address: str
    nproc: int
    arrival: int
    asked: dict[str, str] = field(default_factory=dict)
    round: int = -1
    node: int = -1
    run: RunInfo | None = None
    peers: dict[str, str] = field(default_factory=dict)
    rendezvous_address: str = ""
    serves_rendezvous: bool = False

    def to_json(self) -> str:
        """The member as text."""
        return encode(self)

    @staticmethod
    def from_json(text: str | bytes) -> NodeMember:
        """A member from its text; raises ``BadMessage`` where it is none."""
        return decode(NodeMember, text)


@dataclass(frozen=True)
class Membership:
    """Who is in a world, in the order of node ranks, with the run and the round's number."""

    members: tuple[NodeMember, ...]
    run: RunInfo | None
    round: int

    @property
    def hosts(self) -> list[str]:
        """Their host names, by node rank."""
        return [member.host for member in self.members]


def agree(members: Sequence[NodeMember]) -> Membership:
    """The membership of the world that ``members`` form; each of them comes to the same result.

    Those of the latest world keep their order, so that node 0, which writes the run's events,
    stays node 0 for as long as it lives; newcomers follow in the order they came. The run is that
    of the latest world: a newcomer never starts one beside it.
    """
    ordered = sorted(members, key=lambda m: (-m.round, m.node, m.arrival, m.id))
    first = ordered[0]
    return Membership(tuple(_with_addresses(ordered)), first.run, first.round + 1)


def different(member: NodeMember, first: NodeMember) -> str:
    """How what ``member`` was asked differs from what the run's first launcher was asked."""
    keys = sorted({*member.asked, *first.asked})
    parts = [
        f"{key} is {member.asked.get(key, 'not given')} on {member.host}, "
        f"{first.asked.get(key, 'not given')} on {first.host}"
        for key in keys
        if member.asked.get(key) != first.asked.get(key)
    ]
    return (
        f"launchers that meet must be asked for the same run, but {'; '.join(parts)}. Start all "
        "of them with the same command and config."
    )


def gone(world: Membership) -> dict[str, str]:
    """The members of the world before that are not part of this one: their hosts by id."""
    here = {member.id for member in world.members}
    return {i: host for i, host in world.members[0].peers.items() if i not in here}


def joined(world: Membership) -> list[str]:
    """The hosts of members that a world which had formed before gets in addition."""
    first = world.members[0]
    if first.round < 0:
        return []
    return [member.host for member in world.members if member.id not in first.peers]


def _with_addresses(members: Sequence[NodeMember]) -> list[NodeMember]:
    """Each member with an address that the others can reach.

    The machine that serves the rendezvous may reach itself by a loopback address (many have their
    own name there in /etc/hosts): then its address is where the others have found it.
    """
    if all(is_loopback(member.address) for member in members):
        return list(members)  # several launchers on one machine
    known = next(
        (m.rendezvous_address for m in members if not is_loopback(m.rendezvous_address)), None
    )
    found = []
    for member in members:
        if not is_loopback(member.address):
            found.append(member)
        elif member.serves_rendezvous and known is not None:
            found.append(dataclasses.replace(member, address=known))
        else:
            raise LaunchError(
                f"{member.host} reaches the rendezvous at the loopback address "
                f"{member.address}, where other machines cannot reach it. Name the rendezvous "
                "by an address of its network: --rdzv ADDRESS:PORT."
            )
    return found
