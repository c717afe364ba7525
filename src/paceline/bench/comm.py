"""What each rank of ``bench comm`` does: every collective, size and group, then every pair."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.bench.collectives import COLLECTIVES
from paceline.bench.comm_request import GROUPS, LONGEST, CommRequest, groups_of
from paceline.bench.comm_result import Cell, CommResult, LeftOut, Setting, make_cell
from paceline.bench.latency_fit import predict
from paceline.bench.operations import prepare
from paceline.bench.pairs import Found, PairProbe, between, summarised
from paceline.bench.timing import measure, time_once
from paceline.network.round_robin import round_robin
from paceline.world import World, collectives
from paceline.world.group import Group

_STRIDE = 16


def run(world: World, request: CommRequest, say: Callable[[str], None]) -> CommResult:
    """Measure all that is asked for; every rank gets the whole result. A collective."""
    places = collectives.all_gather_object((world.node, socket.gethostname()))
    nodes = [
        [rank for rank, (node, _) in enumerate(places) if node == number]
        for number in sorted({node for node, _ in places})
    ]
    machines = distinct([places[ranks[0]][1] for ranks in nodes])
    setting = Setting(
        machines=machines,
        ranks=[len(ranks) for ranks in nodes],
        device=device_name(world),
        backend=world.backend,
        dtype=request.dtype,
        torch=torch.__version__,
        seconds=request.seconds,
    )
    result = CommResult(setting, groups_of(nodes, request.groups))
    for kind, ranks_of_groups in result.groups.items():
        groups = [world.group(ranks) for ranks in ranks_of_groups]
        names = [_name(kind, ranks, nodes, machines) for ranks in ranks_of_groups]
        for collective in request.collectives:
            say(f"measuring {collective} ({kind})")
            _measure(
                world, request, result, kind, dict(zip(names, groups, strict=True)), collective
            )
    if request.pairs:
        _measure_pairs(world, request, result, nodes, machines, say)
    return result


def distinct(hosts: Sequence[str]) -> list[str]:
    """Names for machines: host names, with the node's number where several are called the same."""
    shared = Counter(hosts)
    return [f"{host}/{n}" if shared[host] > 1 else host for n, host in enumerate(hosts)]


def _measure(
    world: World,
    request: CommRequest,
    result: CommResult,
    kind: str,
    groups: dict[str, Group],
    collective: str,
) -> None:
    """One collective in one kind of group, from small to large."""
    mine = next((name for name, group in groups.items() if world.rank in group), None)
    members = None if mine is None else groups[mine]
    longest = LONGEST * request.seconds
    points: list[tuple[int, float]] = []
    for size in request.sizes if COLLECTIVES[collective].moves_data else (0,):
        expected = predict(points, size)
        while expected is not None and expected > longest and size > _STRIDE * points[-1][0]:
            # Too far ahead to tell: a single call of a size in between will say more.
            between_them = _STRIDE * points[-1][0]
            points.append(_glance(world, request, members, collective, between_them))
            expected = predict(points, size)
        if expected is not None and expected > longest:
            result.left_out.append(LeftOut(kind, collective, size, expected))
            continue
        found = None if members is None else _one(world, request, members, collective, size)
        gathered = collectives.all_gather_object((mine, found))
        if refused := next((f for _, f in gathered if isinstance(f, str)), None):
            result.left_out.append(LeftOut(kind, collective, size, refused=refused))
            return
        cell = _cell(kind, collective, gathered)
        result.cells.append(cell)
        points.append((cell.size, cell.median))


def _glance(
    world: World, request: CommRequest, members: Group | None, collective: str, size: int
) -> tuple[int, float]:
    """Bytes and seconds of a single call, of the slowest rank of all groups."""
    seconds = 0.0
    if members is not None:
        operation = prepare(collective, members, size, getattr(torch, request.dtype), world.device)
        seconds = time_once(operation, members, world.device)
    return size, max(collectives.all_gather_object(seconds))


def _one(world: World, request: CommRequest, members: Group, collective: str, size: int) -> Any:
    """This rank's ``(bytes, calls in a row, samples)``; a text where the backend cannot do it."""
    device = world.device
    operation = prepare(collective, members, size, getattr(torch, request.dtype), device)
    try:
        plan, samples = measure(operation, members, request.seconds, device)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # Said by the backend before anything moves, and so on every rank.
        if any(
            word in str(error).lower() for word in ("not support", "unsupported", "invalid scal")
        ):
            return f"{world.backend} says: {str(error).splitlines()[0]}"
        raise
    return operation.size, plan.calls, samples


def _cell(kind: str, collective: str, gathered: Sequence[tuple[str | None, Any]]) -> Cell:
    """A cell from what every rank found; each group has planned its calls for itself."""
    found = [(name, *times) for name, times in gathered if name is not None]
    by_group: dict[str, list[list[float]]] = {}
    for name, _, calls, samples in found:
        by_group.setdefault(name, []).append([sample / calls for sample in samples])
    size, calls = max((size, calls) for _, size, calls, _ in found)
    return make_cell(kind, collective, size, calls, by_group)


def _measure_pairs(
    world: World,
    request: CommRequest,
    result: CommResult,
    nodes: Sequence[Sequence[int]],
    machines: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Pairs of machines by their first ranks, and pairs of ranks inside of each machine."""
    probe = PairProbe(world.everyone, world.device, request.seconds)
    firsts = {ranks[0]: name for ranks, name in zip(nodes, machines, strict=True)}
    if len(nodes) > 1:
        say("measuring the links between machines")
        links = _in_rounds(world, probe, round_robin(firsts))
        result.pairs = [between(firsts[a], firsts[b], link) for (a, b), link in links.items()]
    inside = {name: ranks for ranks, name in zip(nodes, machines, strict=True) if len(ranks) > 1}
    if inside:
        say("measuring the links between the ranks of a machine")
        # The n-th rounds of all machines at once.
        plans = [round_robin(ranks) for ranks in inside.values()]
        longest = max(len(plan) for plan in plans)
        at_once = [[p for plan in plans for p in plan[n : n + 1]] for n in range(longest)]
        merged = [[pair for pairs in step for pair in pairs] for step in at_once]
        links = _in_rounds(world, probe, merged)
        for name, ranks in inside.items():
            own = [(pair, link) for pair, link in links.items() if pair[0] in ranks]
            result.inside.append(summarised(name, own))


def _in_rounds(
    world: World, probe: PairProbe, plan: Sequence[Sequence[tuple[int, int]]]
) -> dict[tuple[int, int], Found]:
    """Every link of ``plan``, on all ranks; after each round all of them meet."""
    links: dict[tuple[int, int], Found] = {}
    for at_once in plan:
        pair = next((pair for pair in at_once if world.rank in pair), None)
        found = None
        if pair is not None:
            found = probe.measure(pair[1] if pair[0] == world.rank else pair[0])
        told = collectives.all_gather_object(None if found is None else (pair, found))
        links |= {tuple(one[0]): one[1] for one in told if one is not None}
    return dict(sorted(links.items()))


def _name(
    kind: str, ranks: Sequence[int], nodes: Sequence[Sequence[int]], machines: Sequence[str]
) -> str:
    if kind != "within":
        return GROUPS[kind]
    return next(name for own, name in zip(nodes, machines, strict=True) if ranks[0] in own)


def device_name(world: World) -> str:
    """What this rank computes on."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return "CPU"
