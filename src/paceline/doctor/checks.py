"""All checks, each a function from facts to findings, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.doctor import (
    checks_fabric,
    checks_interfaces,
    checks_machine,
    checks_network,
    checks_storage,
)
from paceline.doctor.facts import ClusterFacts
from paceline.doctor.finding import Finding

CHECKS: Sequence[Callable[[ClusterFacts], list[Finding]]] = (
    checks_machine.config,
    checks_machine.versions,
    checks_machine.launcher,
    checks_network.meeting,
    checks_network.reach,
    checks_network.ports,
    checks_network.names,
    checks_interfaces.interfaces,
    checks_fabric.fabric,
    checks_network.clocks,
    checks_network.speed,
    checks_storage.folders,
    checks_storage.shared,
    checks_storage.disk,
    checks_machine.memory,
    checks_machine.limits,
    checks_machine.cores,
    checks_machine.gpus,
)


def run_checks(facts: ClusterFacts) -> list[Finding]:
    """Every finding, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
