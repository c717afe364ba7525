"""All checks, each a function from facts to findings, and the verdict on everything together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.doctor import judge_interfaces, judge_machine, judge_network, judge_storage
from paceline.doctor.facts import Facts
from paceline.doctor.finding import Finding

CHECKS: Sequence[Callable[[Facts], list[Finding]]] = (
    judge_machine.config,
    judge_machine.versions,
    judge_network.meeting,
    judge_network.reach,
    judge_network.ports,
    judge_network.names,
    judge_interfaces.interfaces,
    judge_network.clocks,
    judge_network.speed,
    judge_storage.folders,
    judge_storage.shared,
    judge_storage.disk,
    judge_machine.memory,
    judge_machine.limits,
    judge_machine.cores,
    judge_machine.gpus,
)


def judge(facts: Facts) -> list[Finding]:
    """Every finding, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
