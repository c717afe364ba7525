"""What the doctor says of networks, for one made-up fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doctor.made_up import cluster, link, machine, network, with_machine
from paceline.doctor import checks_fabric, checks_interfaces, checks_network, facts
from paceline.doctor.checks import run_checks
from paceline.doctor.facts import ClockOffset, FolderSighting, Interface, Lookup, RunPlan, Speed
from paceline.doctor.finding import problems


def test_nothing_is_found_where_all_is_well() -> None:
    findings = run_checks(cluster())
    assert problems(findings) == []
    assert {"reach", "meeting", "ports", "clocks", "speed"} <= {f.check for f in findings}


def test_every_problem_comes_with_a_fix() -> None:
    broken = replace(
        cluster(),
        links=(link(0, 1, "no answer"), link(1, 2, "refused"), link(2, 0, "silent")),
        clocks=(ClockOffset("node0", "node1", 5.0, 0.001),),
        seen=(FolderSighting("track.run_dir", "node0", "node1", False),),
        speeds=(Speed(("node0", "node1"), "gloo", error="timed out"),),
    )
    found = problems(run_checks(broken))
    assert len(found) >= 6
    assert all(finding.fix.endswith((".", ")")) for finding in found)
    assert [f.level for f in found] == sorted((f.level for f in found), key="failed warning".find)


def test_blocked_direction_is_named_and_told_from_the_other() -> None:
    links = tuple(
        link(1, 0, "no answer") if (one.source, one.target) == ("node1", "node0") else one
        for one in cluster().links
    )
    [finding] = problems(checks_network.reach(cluster(links=links)))
    assert finding.level == "failed"
    assert finding.found.startswith("node1 → node0 (10.0.0.1:40000): no answer")
    assert "the other way, node0 → node1, works" in finding.found
    assert finding.fix == "Open TCP ports 32768-60999 on node0 for node1."


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("no answer", "packets are dropped"),
        ("refused", "rejected"),
        ("silent", "no byte came back"),
        ("unreachable", "No route to host"),
    ],
)
def test_kinds_of_unreachability_are_told_apart(outcome: facts.ConnectOutcome, words: str) -> None:
    broken = cluster(2, links=(link(0, 1, outcome, error="No route to host"), link(1, 0, outcome)))
    found = checks_network.reach(broken)
    assert len(found) == 2
    assert words in found[0].found
    assert "works" not in found[0].found


def test_shut_ports_are_a_finding_of_their_own() -> None:
    links = (link(0, 1, "no answer"), link(2, 1, "no answer"), link(1, 0), link(0, 2))
    [finding] = problems(checks_network.ports(cluster(links=links)))
    assert "ports that the system picks get no answer on node1" in finding.found
    partly = (link(0, 1, "no answer"), link(2, 1), link(1, 0), link(0, 2))
    assert problems(checks_network.ports(cluster(links=partly))) == []


def test_missing_machine_is_told_by_who_came() -> None:
    met = replace(cluster().meeting, most=3, least=3, came=("node0", "node2"))
    [finding] = checks_network.meeting(cluster(meeting=met))
    assert finding.level == "failed"
    assert "2 of 3 came: node0, node2" in finding.found
    [enough] = checks_network.meeting(cluster(meeting=replace(met, least=1)))
    assert enough.level == "warning"


def test_loopback_as_meeting_place_is_recognised() -> None:
    met = facts.RendezvousFacts("127.0.0.1:29400", host="node0", came=("node0",))
    [finding] = checks_network.meeting(cluster(meeting=met))
    assert "every machine's own address" in finding.fix


def test_machine_that_left_is_named_with_the_phase() -> None:
    met = replace(cluster().meeting, left={"node1": "shared folders"})
    [finding] = problems(checks_network.meeting(cluster(meeting=met)))
    assert "node1 was gone or silent during: shared folders" in finding.found


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("unresolved", "/etc/hosts"),
        ("no answer", "Open TCP port 29400 on node0"),
        ("refused", "Start paceline doctor on node0"),
        ("unreachable", "route to node0"),
        ("taken", "another free port"),
        ("too late", "--wait"),
    ],
)
def test_each_way_not_to_meet_has_its_fix(place: facts.RendezvousState, fix: str) -> None:
    met = facts.RendezvousFacts("node0:29400", place=place)
    [finding] = checks_network.meeting(cluster(1, meeting=met))
    assert finding.level == "failed"
    assert fix in finding.fix


def test_clocks_apart_are_named_with_who_is_ahead() -> None:
    behind = (ClockOffset("node1", "node0", 2.5, 0.001), ClockOffset("node0", "node1", -2.5, 0.002))
    [finding] = checks_network.clocks(cluster(clocks=behind))
    assert finding.level == "warning"
    assert finding.found == "the clock of node0 is 2.5 s ahead of that of node1"
    [fine] = checks_network.clocks(cluster(clocks=(ClockOffset("node0", "node1", 0.9, 0.001),)))
    assert fine.level == "ok"


def test_shortest_round_trip_tells_the_offset() -> None:
    over_a_slow_link = ClockOffset("node0", "node1", 3.0, 8.0)
    exact = ClockOffset("node1", "node0", 0.01, 0.001)
    [finding] = checks_network.clocks(cluster(clocks=(exact, over_a_slow_link)))
    assert finding.level == "ok"


def test_name_that_does_not_resolve() -> None:
    broken = network(1, own_name=Lookup("node1", error="Name or service not known"))
    [finding] = problems(checks_network.names(with_machine(1, network=broken)))
    assert finding.level == "failed"
    assert "'node1' does not resolve: Name or service not known" in finding.found
    assert "10.0.0.2 node1" in finding.fix


def test_slow_and_missing_names_of_peers() -> None:
    peers = (Lookup("node1", ("10.0.0.2",), 5.0), Lookup("node2", error="unknown"))
    slow, missing = sorted(
        problems(checks_network.names(with_machine(0, peers=peers))),
        key=lambda f: "5 s" not in f.found,
    )
    assert "looking up 'node1' took 5 s" in slow.found
    assert "'node2' of another machine does not resolve" in missing.found


def test_host_name_on_loopback_misleads_gloo() -> None:
    misled = network(2, own_name=Lookup("node2", ("127.0.1.1",)))
    [finding] = problems(checks_interfaces.interfaces(with_machine(2, network=misled)))
    assert finding.level == "failed"
    assert "Gloo would use lo (127.0.1.1), by its host name 'node2'" in finding.found
    assert finding.fix == "On node2: export GLOO_SOCKET_IFNAME=eth0"
    told = replace(misled, gloo_variable="eth0")
    assert problems(checks_interfaces.interfaces(with_machine(2, network=told))) == []


def test_other_interface_that_works_is_a_warning() -> None:
    interfaces = (Interface("eth0", ("10.0.0.1",)), Interface("ib0", ("192.168.0.1",)))
    odd = network(0, interfaces=interfaces, gloo_variable="ib0")
    broken = with_machine(0, network=odd)
    [finding] = problems(checks_interfaces.interfaces(broken))
    assert finding.level == "failed"
    reached = replace(broken, links=(*broken.links, link(1, 0, by_gloo=True)))
    [finding] = problems(checks_interfaces.interfaces(reached))
    assert finding.level == "warning"
    assert "GLOO_SOCKET_IFNAME=ib0" in finding.found


def test_interface_that_is_not_there() -> None:
    odd = network(0, gloo_variable="eth7")
    [finding] = problems(checks_interfaces.interfaces(with_machine(0, network=odd)))
    assert "Gloo would use no interface (no address), by GLOO_SOCKET_IFNAME=eth7" in finding.found


def test_nccl_is_judged_where_ranks_use_gpus() -> None:
    interfaces = (Interface("aaa0", ("172.16.0.1",)), Interface("eth0", ("10.0.0.1",)))
    odd = network(0, interfaces=interfaces)
    assert problems(checks_interfaces.interfaces(with_machine(0, network=odd))) == []
    on_gpu = with_machine(0, network=odd, plan=RunPlan(on_gpu=True))
    [finding] = problems(checks_interfaces.interfaces(on_gpu))
    assert finding.fix == "On node0: export NCCL_SOCKET_IFNAME=eth0"


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        ("", ["ib0"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^ib,docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "docker0", "eth1", "ib0"]),
    ],
)
def test_nccl_variable_is_read_as_nccl_reads_it(variable: str, chosen: list[str]) -> None:
    names = ("lo", "docker0", "eth0", "eth1", "ib0")
    interfaces = [Interface(name, ("10.0.0.1",)) for name in names]
    assert checks_interfaces.nccl_choice(interfaces, variable) == chosen


def test_slow_pair_is_named_against_the_median() -> None:
    speeds = (
        Speed(("node0", "node1"), "gloo", 1e9, 0.001),
        Speed(("node0", "node2"), "gloo", 1.1e8, 0.002),
        Speed(("node1", "node2"), "gloo", 1e9, 0.001),
    )
    [finding] = checks_network.speed(cluster(speeds=speeds))
    assert finding.level == "warning"
    assert finding.found.startswith("node0 ↔ node2: gloo moves 110 MB/s")
    assert "the median pair moves 1 GB/s" in finding.found


def test_only_pair_may_be_slow_by_itself() -> None:
    [finding] = checks_network.speed(
        cluster(2, speeds=(Speed(("node0", "node1"), "gloo", 2e6, 0.05),))
    )
    assert finding.level == "warning"


def test_failed_collective_is_a_failure() -> None:
    speeds = (Speed(("node0", "node1"), "nccl", error="unhandled system error"),)
    [finding] = checks_network.speed(cluster(2, speeds=speeds))
    assert finding.level == "failed"
    assert "NCCL_DEBUG=INFO" in finding.fix


def test_one_machine_alone_has_no_network_findings() -> None:
    alone = facts.ClusterFacts((machine(0, network=network(0, address="")),))
    assert problems(run_checks(alone)) == []
    assert not {"meeting", "reach", "interface", "clocks"} & {f.check for f in run_checks(alone)}


def test_adapters_and_what_nccl_is_told_are_shown():
    assert checks_fabric.fabric(cluster(2)) == []
    told = {"adapters": ("mlx5_0", "mlx5_1"), "variables": ("NCCL_SOCKET_IFNAME=eth1",)}
    plan = RunPlan(network_env=("NCCL_DEBUG=INFO",))
    same = cluster(1, machines=(machine(0, network=network(0, **told), plan=plan),))
    [shown] = checks_fabric.fabric(same)
    assert shown.level == "ok"
    assert shown.found == (
        "node0: adapters mlx5_0, mlx5_1; NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME=eth1"
    )


def test_adapters_need_memory_that_may_be_locked():
    limits = replace(machine().limits, locked_memory=65536)
    little = machine(0, network=network(0, adapters=("mlx5_0",)), limits=limits)
    [found] = checks_fabric.fabric(cluster(1, machines=(little,)))
    assert found.level == "warning"
    assert "64 KiB" in found.found
    assert "ulimit -l unlimited" in found.fix
    assert checks_fabric.fabric(cluster(1, machines=(machine(0, limits=limits),))) == []


def test_what_nccl_is_told_is_to_be_the_same_everywhere():
    variables = ("NCCL_IB_HCA=mlx5_0", "NCCL_SOCKET_IFNAME=eth0")
    [found] = checks_fabric.fabric(with_machine(1, network=network(1, variables=variables)))
    assert found.found == "NCCL_IB_HCA is not set on node0, node2; 'mlx5_0' on node1"
    by_config = RunPlan(network_env=("NCCL_IB_HCA=mlx5_0",))
    machines = tuple(machine(n, plan=by_config) for n in range(2))
    assert {f.level for f in checks_fabric.fabric(cluster(2, machines=machines))} == {"ok"}
