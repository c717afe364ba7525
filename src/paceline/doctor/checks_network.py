"""Judging whether the machines meet and reach each other, by name and by clock, and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from paceline.doctor.facts import ClusterFacts, Connection, Machine, RendezvousFacts, Speed
from paceline.doctor.finding import Finding, failed, ok, warning
from paceline.formatting import byte_rate, plural, short_time
from paceline.launch.listening import is_loopback

SLOW_LOOKUP_S = 1.0
MOST_CLOCK_OFFSET_S = 1.0
SLOW_SHARE = 0.5
"""A pair is slow when it gets less than this share of what the median pair gets."""
SLOW_RATE = 10e6
"""Bytes a second below which training over a link is hopeless, whatever the other links do."""


def meeting(facts: ClusterFacts) -> list[Finding]:
    """Whether all machines came to the place where they meet, and stayed."""
    met = facts.meeting
    if met is None:
        return []
    openness = [_open_to_strangers(met)] if met.open else []
    if met.place != "met":
        return [_no_meeting(met), *openness]
    came = f"{len(met.came)} of {met.most} came: {', '.join(met.came)}"
    where = f" (meeting at {met.endpoint}, served by {met.host})"
    findings = []
    if len(met.came) == met.most:
        findings.append(ok("meeting", came + where))
    else:
        fix = (
            "Start the same command on each missing machine while the others wait (--wait sets "
            f"how long), and see there why it does not reach {met.endpoint}."
        )
        if is_loopback(met.endpoint.rpartition(":")[0]):
            fix = (
                f"{met.endpoint} is every machine's own address: give --rdzv the name or address "
                "of one machine that all others reach."
            )
        judge = failed if len(met.came) < met.least else warning
        findings.append(judge("meeting", came + where, fix))
    findings += [
        failed(
            "meeting",
            f"{name} was gone or silent during: {phase}",
            f"Look at what paceline doctor printed on {name}, and start it on all machines again.",
        )
        for name, phase in met.left.items()
    ]
    return [*findings, *openness]


def _open_to_strangers(met: RendezvousFacts) -> Finding:
    what, _, fix = met.open.partition(" To close it: ")
    return warning("meeting", what, f"{fix[:1].upper()}{fix[1:]}.")


def _no_meeting(met: RendezvousFacts) -> Finding:
    host, _, port = met.endpoint.rpartition(":")
    fixes = {
        "unresolved": f"Give --rdzv an address instead of the name {host}, or add the name to DNS "
        "or /etc/hosts on this machine.",
        "no answer": f"Open TCP port {port} on {host} for this machine: something drops packets, "
        "as firewalls do.",
        "refused": f"Start paceline doctor on {host} as well: it is the one that serves the "
        f"meeting at port {port}.",
        "unreachable": f"Give this machine a route to {host} (ip route get {host}).",
        "taken": "Give --rdzv another free port of one of these machines; a run that goes on "
        "there, or paceline rendezvous, need not be stopped.",
        "too late": "Start the command on all machines within --wait seconds.",
    }
    return failed("meeting", f"{met.endpoint}: {met.detail or met.place}", fixes[met.place])


def reach(facts: ClusterFacts) -> list[Finding]:
    """Whether every machine can connect to every other one, in both directions."""
    links = [link for link in facts.links if not link.by_gloo]
    bad = [link for link in links if link.outcome != "ok"]
    findings = [_unreached(link, facts) for link in bad]
    good = [link for link in links if link.outcome == "ok"]
    if good and not bad:
        slowest = max(good, key=lambda link: link.seconds)
        findings.append(
            ok(
                "reach",
                f"{plural(len(good), 'direction')} between machines; the slowest connection "
                f"{slowest.source} → {slowest.target} took {short_time(slowest.seconds)}",
            )
        )
    return findings


def _unreached(link: Connection, facts: ClusterFacts) -> Finding:
    found = f"{link.source} → {link.target} ({link.address}:{link.port}): {link.outcome}"
    back = [one for one in facts.links if (one.source, one.target) == (link.target, link.source)]
    if any(one.outcome == "ok" and not one.by_gloo for one in back):
        found += f"; the other way, {link.target} → {link.source}, works"
    target = _machine(facts, link.target)
    ports = target.network.port_range if target is not None else None
    between = f"{ports[0]}-{ports[1]}" if ports else "above 1024"
    if link.outcome == "no answer":
        found += " (packets are dropped, as firewalls do)"
        fix = f"Open TCP ports {between} on {link.target} for {link.source}."
    elif link.outcome == "refused":
        found += " (the connection was rejected)"
        fix = (
            f"See whether {link.address} is really {link.target}, and let its firewall accept TCP "
            f"ports {between} from {link.source}."
        )
    elif link.outcome == "silent":
        found += " (connected, and then no byte came back)"
        fix = (
            f"Look for a proxy or a firewall between {link.source} and {link.target} that takes "
            "connections itself; and compare the MTUs (ip link)."
        )
    else:
        found += f" ({link.error})"
        fix = f"Give {link.source} a route to {link.address} (ip route get {link.address})."
    return failed("reach", found, fix)


def ports(facts: ClusterFacts) -> list[Finding]:
    """Whether ports that ranks listen on can be reached, where the rendezvous' own port can."""
    met = facts.meeting
    links = [link for link in facts.links if not link.by_gloo]
    if met is None or met.place != "met" or not links:
        return []
    port = met.endpoint.rpartition(":")[2]
    silent = {link.target for link in links if link.outcome == "no answer"}
    # One that others reach is not shut: what stands between two machines is told with the pair.
    if shut := sorted(silent - {link.target for link in links if link.outcome != "no answer"}):
        return [
            failed(
                "ports",
                f"port {port} of {met.host} is open, but connections to ports that the system "
                f"picks get no answer on {', '.join(shut)}",
                "Ranks listen on such ports: open the range in /proc/sys/net/ipv4/"
                "ip_local_port_range between the machines, or put them in one security group.",
            )
        ]
    text = f"{met.endpoint} is free and ours"
    return [ok("ports", text if silent else f"{text}; ports that the system picks are open")]


def clocks(facts: ClusterFacts) -> list[Finding]:
    """Whether the machines' clocks agree: logs and events of several machines are read as one."""
    offsets: dict[tuple[str, str], float] = {}
    for clock in sorted(facts.clocks, key=lambda clock: -clock.round_trip):
        pair, sign = (clock.source, clock.target), 1.0
        if pair[0] > pair[1]:
            pair, sign = (pair[1], pair[0]), -1.0
        offsets[pair] = sign * clock.offset  # the shortest round trip comes last, and counts
    if not offsets:
        return []
    bad = {pair: by for pair, by in offsets.items() if abs(by) > MOST_CLOCK_OFFSET_S}
    if not bad:
        return [ok("clocks", f"within {short_time(max(map(abs, offsets.values())))} of each other")]
    return [
        warning(
            "clocks",
            f"the clock of {second if by > 0 else first} is {abs(by):.1f} s ahead of that of "
            f"{first if by > 0 else second}",
            "Set the clocks by NTP on both (timedatectl set-ntp true, or chronyc makestep): events "
            "of several machines are ordered by them.",
        )
        for (first, second), by in bad.items()
    ]


def names(facts: ClusterFacts) -> list[Finding]:
    """Whether host names resolve, quickly, and not to loopback where several machines meet."""
    several = len(facts.machines) > 1
    findings = []
    for machine in facts.machines:
        own = machine.network.own_name
        if own.error:
            judge = warning if machine.network.gloo_variable or not several else failed
            findings.append(
                judge(
                    "names",
                    f"{machine.name}: its own host name {own.name!r} does not resolve: {own.error}",
                    f"Add a line '{machine.network.address or '127.0.1.1'} {own.name}' to "
                    f"/etc/hosts on {machine.name}.",
                )
            )
        findings += [
            warning(
                "names",
                f"{machine.name}: the name {lookup.name!r} of another machine does not resolve: "
                f"{lookup.error}",
                f"Add {lookup.name} to DNS, or to /etc/hosts on {machine.name}; or use addresses "
                "in --rdzv.",
            )
            for lookup in machine.peers
            if lookup.error
        ]
        findings += _slow_lookups(machine)
    if not findings and facts.machines:
        slowest = max(
            lookup.seconds
            for machine in facts.machines
            for lookup in (machine.network.own_name, *machine.peers)
        )
        own_names = ", ".join(
            f"{m.network.own_name.name} = {' '.join(m.network.own_name.addresses[:2])}"
            for m in facts.machines[:3]
        )
        findings.append(ok("names", f"{own_names}; the slowest lookup took {short_time(slowest)}"))
    return findings


def _slow_lookups(machine: Machine) -> Iterable[Finding]:
    for lookup in (machine.network.own_name, *machine.peers):
        if lookup.seconds > SLOW_LOOKUP_S:
            yield warning(
                "names",
                f"{machine.name}: looking up {lookup.name!r} took {short_time(lookup.seconds)}",
                f"Add {lookup.name} to /etc/hosts on {machine.name}, or repair the name servers in "
                "/etc/resolv.conf: every rank looks names up when it joins.",
            )


def speed(facts: ClusterFacts) -> list[Finding]:
    """How fast collectives are by pair; the slow pair is named against the median."""
    findings = [_no_speed(one) for one in facts.speeds if one.error]
    measured = [one for one in facts.speeds if not one.error]
    for backend in sorted({one.backend for one in measured}):
        group = [one for one in measured if one.backend == backend]
        middle = statistics.median(one.rate for one in group)
        for one in group:
            is_slow = len(group) > 1 and one.rate < SLOW_SHARE * middle
            if is_slow or one.rate < SLOW_RATE:
                findings.append(_slow(one, middle, len(group)))
        if not any(finding.level != "ok" for finding in findings):
            findings.append(ok("speed", _speeds_in_words(group, middle)))
    return findings


def _slow(one: Speed, middle: float, count: int) -> Finding:
    pair = _among(one)
    found = (
        f"{pair}: {one.backend} moves {byte_rate(one.rate)}, {short_time(one.latency)} for an "
        "empty all-reduce"
    )
    if count > 1:
        found += f"; the median pair moves {byte_rate(middle)}"
    return warning(
        "speed",
        found,
        f"Look at the cable, the switch port and the speed (ethtool) between {pair}; every step "
        "waits for its slowest pair.",
    )


def _no_speed(one: Speed) -> Finding:
    pair = _among(one)
    return failed(
        "speed",
        f"{pair}: {one.backend} could not all-reduce: {one.error}",
        f"Set {'NCCL_DEBUG=INFO' if one.backend == 'nccl' else 'GLOO_SOCKET_IFNAME'} on these "
        "machines, mend what failed above first, and run the doctor again.",
    )


def _speeds_in_words(group: Sequence[Speed], middle: float) -> str:
    slowest = min(group, key=lambda one: one.rate)
    latency = max(one.latency for one in group)
    if len(slowest.members) == 1:
        return f"{slowest.backend} starts on {slowest.members[0]}"
    if len(group) == 1:
        return (
            f"{slowest.backend} between {_among(slowest)}: {byte_rate(slowest.rate)}, "
            f"{short_time(latency)} for an empty all-reduce"
        )
    return (
        f"{slowest.backend}, {len(group)} pairs: median {byte_rate(middle)}, slowest "
        f"{_among(slowest)} {byte_rate(slowest.rate)}, latency up to {short_time(latency)}"
    )


def _among(one: Speed) -> str:
    """The members of a measurement: a pair by its names, many by the first and the last."""
    if len(one.members) <= 2:
        return " ↔ ".join(one.members)
    return f"{one.members[0]} … {one.members[-1]}"


def _machine(facts: ClusterFacts, name: str) -> Machine | None:
    return next((machine for machine in facts.machines if machine.name == name), None)
