"""Judging whether Gloo and NCCL would use the interface that reaches the other machines."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.doctor.facts import ClusterFacts, Connection, Interface, Machine, Network
from paceline.doctor.finding import Finding, failed, ok, warning
from paceline.launch.listening import is_loopback


def interfaces(facts: ClusterFacts) -> list[Finding]:
    """Whether Gloo and NCCL would use the interface that reaches the other machines."""
    findings = []
    for machine in facts.machines:
        network = machine.network
        if not network.address or len(facts.machines) < 2:
            continue
        right = interface_of(network, network.address)
        where = f"{right or '?'} ({network.address})"
        problems = [
            *_gloo_problems(machine, right, facts.links),
            *(_nccl_problems(machine, right) if machine.plan.on_gpu else ()),
        ]
        if not problems:
            problems = [ok("interface", f"{machine.name}: {where} reaches the others, and is used")]
        findings += problems
    return findings


def _gloo_problems(machine: Machine, right: str, links: Sequence[Connection]) -> list[Finding]:
    network = machine.network
    name, address = gloo_choice(network)
    if right in (name, *network.gloo_variable.split(",")):
        return []
    chosen_by = (
        f"GLOO_SOCKET_IFNAME={network.gloo_variable}"
        if network.gloo_variable
        else f"its host name {network.host!r}"
    )
    found = (
        f"{machine.name}: Gloo would use {name or 'no interface'} ({address or 'no address'}), by "
        f"{chosen_by}; {right or '?'} ({network.address}) is what reaches the others"
    )
    fix = f"On {machine.name}: export GLOO_SOCKET_IFNAME={right}"
    tried = [link for link in links if link.target == machine.name and link.by_gloo]
    if tried and all(link.outcome == "ok" for link in tried):
        return [warning("interface", f"{found}; it works, maybe over a slower network", fix)]
    return [failed("interface", found, fix)]


def _nccl_problems(machine: Machine, right: str) -> list[Finding]:
    chosen = nccl_choice(machine.network.interfaces, machine.network.nccl_variable)
    if not right or right in chosen[:1] or (machine.network.nccl_variable and right in chosen):
        return []
    by = (
        f"NCCL_SOCKET_IFNAME={machine.network.nccl_variable}"
        if machine.network.nccl_variable
        else "its own rule"
    )
    return [
        warning(
            "interface",
            f"{machine.name}: NCCL would use {', '.join(chosen) or 'no interface'}, by {by}; "
            f"{right} ({machine.network.address}) is what reaches the others",
            f"On {machine.name}: export NCCL_SOCKET_IFNAME={right}",
        )
    ]


# Which interface a library would take.


def gloo_choice(network: Network) -> tuple[str, str]:
    """Interface and address that torch's Gloo would use on this machine.

    By ``GLOO_SOCKET_IFNAME``; else the first address of the host name that belongs to this
    machine; else loopback.
    """
    addresses = {i.name: i.addresses for i in network.interfaces}
    if network.gloo_variable:
        name = network.gloo_variable.split(",")[0].strip()
        return (name, next(iter(addresses.get(name, ())), "")) if name in addresses else ("", "")
    for address in network.own_name.addresses:
        if is_loopback(address):
            return "lo", address
        if name := interface_of(network, address):
            return name, address
    return "lo", "127.0.0.1"


def nccl_choice(interfaces: Sequence[Interface], variable: str) -> list[str]:
    """Interfaces that NCCL would use for its sockets, the first choice first.

    ``NCCL_SOCKET_IFNAME`` lists beginnings of names, after ``=`` whole names, after ``^`` names to
    leave out. Without it: InfiniBand's (``ib…``) first, then all but docker's and loopback.
    """
    names = [i.name for i in interfaces if i.addresses]
    if variable:
        leave_out, exact = variable.startswith("^"), variable.lstrip("^").startswith("=")
        words = [word.strip() for word in variable.lstrip("^=").split(",") if word.strip()]

        def is_listed(name: str) -> bool:
            return any(name == word if exact else name.startswith(word) for word in words)

        return [name for name in names if is_listed(name) != leave_out]
    infiniband = [name for name in names if name.startswith("ib")]
    rest = [name for name in names if not name.startswith(("ib", "docker", "lo"))]
    return infiniband or rest[:1] or [name for name in names if name.startswith("docker")][:1]


def interface_of(network: Network, address: str) -> str:
    """The interface that has ``address``; empty when none has."""
    if is_loopback(address):
        return "lo"
    return next((i.name for i in network.interfaces if address in i.addresses), "")
