"""Facts about machines that are not there, for judging each fault by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.doctor import facts
from paceline.doctor.facts import (
    ClusterFacts,
    Connection,
    ConnectOutcome,
    FolderFacts,
    Interface,
    Lookup,
    Machine,
    ModelSize,
    Network,
    RunPlan,
    SystemLimits,
    Versions,
)

GIB = 2**30


def network(number: int, **changes: Any) -> Network:
    address = f"10.0.0.{number + 1}"
    healthy = Network(
        host=f"node{number}",
        own_name=Lookup(f"node{number}", (address,), 0.001),
        interfaces=(Interface("lo", ("127.0.0.1",)), Interface("eth0", (address,))),
        address=address,
        port_range=(32768, 60999),
    )
    return replace(healthy, **changes)


def machine(number: int = 0, **changes: Any) -> Machine:
    healthy = Machine(
        name=f"node{number}",
        network=network(number),
        limits=SystemLimits(
            cores=8,
            files=65536,
            files_hard=65536,
            processes=10_000,
            processes_used=100,
            shm_total=16 * GIB,
            shm_free=16 * GIB,
            memory_total=64 * GIB,
            memory_free=60 * GIB,
        ),
        versions=Versions("1.0", "2.13.0", "3.11.7", config="c0ffee", commit="abc"),
        folders=(FolderFacts("track.run_dir", "/shared/runs", False, True, "", 500 * GIB, 0.02),),
        model=ModelSize(parameters=1000, model_bytes=4 * GIB, optimizer_bytes=8 * GIB),
        plan=RunPlan(nproc=2, most_nodes=3, least_nodes=3, checkpoints_at_once=3),
    )
    return replace(healthy, **changes)


def link(source: int, target: int, outcome: ConnectOutcome = "ok", **changes: Any) -> Connection:
    made = Connection(
        f"node{source}", f"node{target}", f"10.0.0.{target + 1}", 40000, outcome, 0.001
    )
    return replace(made, **changes)


def cluster(count: int = 3, **changes: Any) -> ClusterFacts:
    """Machines that are all well; ``changes`` replace fields of the facts."""
    numbers = range(count)
    healthy = ClusterFacts(
        machines=tuple(machine(number) for number in numbers),
        meeting=facts.RendezvousFacts(
            "node0:29400",
            host="node0",
            least=count,
            most=count,
            came=tuple(f"node{number}" for number in numbers),
        ),
        links=tuple(link(a, b) for a in numbers for b in numbers if a != b),
        clocks=(facts.ClockOffset("node0", "node1", 0.001, 0.0004),),
        seen=tuple(
            facts.FolderSighting("track.run_dir", f"node{a}", f"node{b}", True)
            for a in numbers
            for b in numbers
            if a != b
        ),
        speeds=tuple(
            facts.Speed((f"node{a}", f"node{b}"), "gloo", 1e9, 0.0005)
            for a in numbers
            for b in numbers
            if a < b
        ),
    )
    return replace(healthy, **changes)


def with_machine(number: int, **changes: Any) -> ClusterFacts:
    """A healthy cluster of three but for machine ``number``."""
    healthy = cluster()
    machines = list(healthy.machines)
    machines[number] = replace(machines[number], **changes)
    return replace(healthy, machines=tuple(machines))


def with_limits(number: int, **changes: Any) -> ClusterFacts:
    limits = replace(machine(number).limits, **changes)
    return with_machine(number, limits=limits)
