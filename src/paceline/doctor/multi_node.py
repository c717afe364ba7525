"""Gathering the facts of several machines: each examines itself and its links, then they share."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.doctor import facts
from paceline.doctor.checks_interfaces import gloo_choice, interface_of
from paceline.doctor.facts import (
    ClockOffset,
    ClusterFacts,
    Connection,
    FolderSighting,
    Machine,
    Network,
    Speed,
)
from paceline.doctor.facts_folders import Tokens
from paceline.doctor.facts_network import address_towards, gather_network, look_up
from paceline.doctor.links import Echo, try_link
from paceline.doctor.own_machine import (
    COLLECTIVE_TIMEOUT_S,
    DoctorRequest,
    OwnMachine,
    examine_alone,
    speed_of,
)
from paceline.doctor.rendezvous import PREFIX, DoctorRendezvous, RendezvousFailed, RendezvousLost
from paceline.launch.listening import is_loopback
from paceline.launch.secret import open_to_strangers
from paceline.network.round_robin import round_robin

# Reading machines' own facts may take torch's import and the build of a model.
_FACTS_TIMEOUT_S = 180.0
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_TOKEN = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class _Peer:
    """Another machine, or this one, as it introduced itself."""

    number: int
    name: str
    host: str
    address: str
    gloo_address: str
    port: int


@dataclass(frozen=True)
class MachineCard:
    """How a machine introduces itself; ``token`` is in the names of the files it will look for.

    A stranger may show one, too: so that neither can name a file elsewhere.
    """

    host: str
    address: str
    gloo: str
    port: int
    token: str

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host) or not _TOKEN.fullmatch(self.token):
            raise ValueError("no name of a machine, or no token")
        if not 0 <= self.port < 65536:
            raise ValueError("no port")


@dataclass(frozen=True)
class LinkReport:
    """What a machine found when it connected to the others."""

    links: list[Connection]
    clocks: list[ClockOffset]


@dataclass
class _Gathered:
    """What is known so far, should the rendezvous end early."""

    machines: dict[int, Machine] = field(default_factory=dict)
    links: list[Connection] = field(default_factory=list)
    clocks: list[ClockOffset] = field(default_factory=list)
    seen: list[FolderSighting] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)


def examine_together(own: OwnMachine, request: DoctorRequest) -> ClusterFacts:
    """Join the other machines at the config's ``launch.rdzv`` and gather facts with them."""
    plan, endpoint = own.asked.plan, own.asked.rdzv[0]
    how = facts.RendezvousFacts(
        str(endpoint),
        least=plan.least_nodes,
        most=plan.most_nodes,
        open=open_to_strangers(own.asked.rdzv, own.asked.secret) or "",
    )
    request.say(f"waiting up to {request.wait:g} s for {plan.most_nodes} machines at {endpoint}")
    with contextlib.ExitStack() as stack:
        echo = Echo()
        stack.callback(echo.close)
        tokens = Tokens(own.asked.folders, secrets.token_hex(4))
        stack.callback(tokens.remove_folders)
        stack.callback(tokens.clean_up)
        try:
            rendezvous = DoctorRendezvous(
                endpoint.host, endpoint.port, request.wait, own.who_serves, own.asked.secret
            )
        except RendezvousFailed as reason:
            how = replace(how, place=reason.place, detail=reason.detail)
            return replace(examine_alone(own, tokens), meeting=how)
        stack.callback(rendezvous.close)
        try:
            return _Together(own, rendezvous, tokens, request, how).run(echo.port)
        except RendezvousFailed as reason:
            how = replace(how, place=reason.place, detail=reason.detail)
        except RendezvousLost as reason:
            how = replace(how, place="no answer", detail=str(reason))
        except BaseException:  # Ctrl-C: the others need not wait for this machine
            rendezvous.leave(early=True)
            raise
        return replace(examine_alone(own, tokens), meeting=how)


class _Together:
    def __init__(
        self,
        own: OwnMachine,
        rendezvous: DoctorRendezvous,
        tokens: Tokens,
        request: DoctorRequest,
        how: facts.RendezvousFacts,
    ) -> None:
        self.own, self.rendezvous, self.tokens = own, rendezvous, tokens
        self.request, self.how = request, how
        self.found = _Gathered()
        self.peers: dict[int, _Peer] = {}
        self.place = own.asked.rdzv[0]
        self.network = gather_network(address_towards(self.place.host, self.place.port))
        self.phase = "rendezvous"

    def run(self, port: int) -> ClusterFacts:
        """Go through all phases, or as many as the rendezvous lasts for."""
        self._introduce(port)
        try:
            for phase in (self._links, self._machines, self._folders, self._speeds):
                phase()
            self.rendezvous.leave()
        except RendezvousLost:
            first = self.peers[self.rendezvous.present[0]]
            self.rendezvous.left[first.number] = self.phase
        return self._facts()

    @property
    def me(self) -> _Peer:
        return self.peers[self.rendezvous.number]

    @property
    def others(self) -> list[_Peer]:
        gone = {self.rendezvous.number, *self.rendezvous.left}
        return [peer for number, peer in self.peers.items() if number not in gone]

    def _introduce(self, port: int) -> None:
        card = MachineCard(
            socket.gethostname(),
            self.network.address,
            gloo_choice(self.network)[1],
            port,
            self.tokens.token,
        )
        cards: dict[int, MachineCard] = self.rendezvous.gather(
            asdict(card), self.how.most, MachineCard
        )
        names = distinct_names(
            [card.host for card in cards.values()], [card.address for card in cards.values()]
        )
        for (number, one), name in zip(cards.items(), names, strict=True):
            self.peers[number] = _Peer(number, name, one.host, one.address, one.gloo, one.port)
        first = min(cards)
        self.tokens.token = cards[first].token
        self.how = replace(self.how, came=tuple(sorted(names)), host=self.peers[first].name)

    def _tell(self, phase: str, mine: Any, kind: Any) -> dict[int, Any]:
        self.phase = phase
        return self.rendezvous.exchange(phase, mine, _FACTS_TIMEOUT_S, kind)

    def _links(self) -> None:
        """Connect to every other machine; and to where Gloo would, if that is another address."""
        self.request.say("connecting every machine to every other")
        tries = [(peer, peer.address, False) for peer in self.others]
        tries += [
            (peer, peer.gloo_address, True)
            for peer in self.others
            # Whose Gloo would be on loopback, nobody can reach: connecting would find ourselves.
            if peer.gloo_address not in ("", peer.address) and not is_loopback(peer.gloo_address)
        ]
        with ThreadPoolExecutor(max(1, len(tries))) as pool:
            results = list(
                pool.map(
                    lambda one: try_link(
                        self.me.name, one[0].name, one[1], one[0].port, by_gloo=one[2]
                    ),
                    tries,
                )
            )
        mine = LinkReport(
            [link for link, _ in results], [clock for _, clock in results if clock is not None]
        )
        for told in self._tell("links", asdict(mine), LinkReport).values():
            self.found.links += told.links
            self.found.clocks += told.clocks

    def _machines(self) -> None:
        """Every machine's facts about itself; its token files are written with them."""
        self.request.say("looking at each machine")
        # The other machines, and those that may serve the rendezvous instead of the first.
        hosts = [*(peer.host for peer in self.others), *(e.host for e in self.own.asked.rdzv[1:])]
        lookups = look_up(list(dict.fromkeys(hosts)))
        mine = self.own.gather(self.me.name, self.network, self.tokens)
        mine = replace(mine, peers=tuple(lookups))
        self.found.machines[self.me.number] = mine
        self.found.machines |= self._tell("machine facts", asdict(mine), Machine)

    def _folders(self) -> None:
        """Look for the others' files; then all remove theirs, and at last the folders."""
        names = [peer.name for peer in self.others]
        written = {
            folder.key
            for machine in self.found.machines.values()
            for folder in machine.folders
            if not folder.error
        }
        seen = [one for one in self.tokens.read(self.me.name, names) if one.key in written]
        for told in self._tell(
            "shared folders", [asdict(one) for one in seen], list[FolderSighting]
        ).values():
            self.found.seen += told
        self.tokens.clean_up()
        self._tell("cleaning up", None, None)

    def _speeds(self) -> None:
        """All-reduce with every machine in turn."""
        self.request.say("measuring collectives by pair")
        backend = "gloo"
        if all(m.plan.on_gpu and m.gpus.visible for m in self.found.machines.values()):
            backend = "nccl"
        for number, pairs in enumerate(round_robin(self.peers)):
            here = [pair for pair in pairs if not self.rendezvous.left.keys() & set(pair)]
            mine: dict[str, Any] | None = None
            for first, second in here:
                is_mine = self.rendezvous.number in (first, second)
                if is_mine and self._reach_each_other(first, second):
                    mine = asdict(self._measure(backend, first, second))
            told = self._tell(f"speed, round {number + 1}", mine, Speed | None)
            for first, _ in here:
                if told.get(first) is not None:
                    self.found.speeds.append(told[first])

    def _measure(self, backend: str, first: int, second: int) -> Speed:
        job = self.own.prober.submit(
            "collective",
            COLLECTIVE_TIMEOUT_S,
            backend=backend,
            rank=0 if self.rendezvous.number == first else 1,
            size=2,
            store=dict(zip(("host", "port"), self.rendezvous.store_place, strict=True)),
            prefix=f"{PREFIX}/pair/{first}-{second}",
            patience_s=COLLECTIVE_TIMEOUT_S,
            device="cpu" if backend == "gloo" else "cuda:0",
            interface=self._interface(),
        )
        names = sorted((self.peers[first].name, self.peers[second].name))
        return speed_of(tuple(names), backend, [job])

    def _interface(self) -> str:
        """The interface that reaches the others, where Gloo by itself would take another one.

        That it would is a finding of its own; the speed is measured nevertheless.
        """
        network: Network = self.network
        right = interface_of(network, network.address)
        return right if gloo_choice(network)[0] != right else ""

    def _reach_each_other(self, first: int, second: int) -> bool:
        names = {self.peers[first].name, self.peers[second].name}
        links = [link for link in self.found.links if {link.source, link.target} == names]
        usual = [link for link in links if not link.by_gloo]
        return len(usual) == 2 and all(link.outcome == "ok" for link in usual)

    def _facts(self) -> ClusterFacts:
        machines = self.found.machines
        if self.me.number not in machines:  # the rendezvous ended before that
            network = self.network
            machines = {self.me.number: self.own.gather(self.me.name, network, self.tokens)}
        left = {self.peers[number].name: phase for number, phase in self.rendezvous.left.items()}
        found = self.found
        # By name, not in the order in which they came: the next report will look the same.
        return ClusterFacts(
            machines=tuple(sorted(machines.values(), key=lambda machine: machine.name)),
            meeting=replace(self.how, left=left),
            links=tuple(sorted(found.links, key=lambda k: (k.source, k.target, k.by_gloo))),
            clocks=tuple(sorted(found.clocks, key=lambda c: (c.source, c.target))),
            seen=tuple(sorted(found.seen, key=lambda s: (s.key, s.reader, s.writer))),
            speeds=tuple(sorted(found.speeds, key=lambda s: s.members)),
        )


def distinct_names(hosts: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """A name for each machine: its host name, with its address or a number where that is shared."""
    names = list(hosts)
    if len(set(names)) < len(names):
        shared = Counter(hosts)
        names = [
            f"{host}/{address}" if shared[host] > 1 and address else host
            for host, address in zip(hosts, addresses, strict=True)
        ]
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return distinct
