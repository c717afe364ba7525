"""Judging fast networks: their adapters, what NCCL is told of them, memory that may be locked."""

from __future__ import annotations

from paceline.doctor.facts import ClusterFacts, Machine
from paceline.doctor.finding import Finding, ok, warning
from paceline.formatting import binary_size

LITTLE_LOCKED_MEMORY = 2**30
"""Adapters pin the buffers they read and write: less than this is soon used up."""
_JUDGED_ELSEWHERE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Interfaces may well have another name on each machine; see ``checks_interfaces``."""


def fabric(facts: ClusterFacts) -> list[Finding]:
    """Adapters and variables of every machine; nothing where there are neither."""
    shown = [machine for machine in facts.machines if machine.network.adapters or _told(machine)]
    problems = [finding for machine in shown for finding in _locked_memory(machine)]
    problems += _differences(facts)
    return problems or [ok("fabric", _in_words(machine)) for machine in shown]


def _told(machine: Machine) -> dict[str, str]:
    """What ranks are told by variables: the environment's, and those of launch.env over them."""
    texts = (*machine.network.variables, *machine.plan.network_env)
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _in_words(machine: Machine) -> str:
    adapters = ", ".join(machine.network.adapters)
    parts = [f"adapters {adapters}" if adapters else "no InfiniBand, RoCE or EFA adapters"]
    parts += [f"{name}={value}" for name, value in sorted(_told(machine).items())]
    return f"{machine.name}: {'; '.join(parts)}"


def _locked_memory(machine: Machine) -> list[Finding]:
    allowed = machine.limits.locked_memory
    if not machine.network.adapters or allowed is None or allowed >= LITTLE_LOCKED_MEMORY:
        return []
    return [
        warning(
            "fabric",
            f"{machine.name}: {binary_size(allowed)} of memory may be locked, but "
            f"{', '.join(machine.network.adapters)} need to lock what they send",
            f"On {machine.name}, before starting: ulimit -l unlimited (memlock in "
            "/etc/security/limits.conf, LimitMEMLOCK= of a service, IPC_LOCK in a pod).",
        )
    ]


def _differences(facts: ClusterFacts) -> list[Finding]:
    told = {machine.name: _told(machine) for machine in facts.machines}
    findings = []
    names = {name for variables in told.values() for name in variables}
    for name in sorted(names.difference(_JUDGED_ELSEWHERE)):
        by_value: dict[str | None, list[str]] = {}
        for machine, variables in told.items():
            by_value.setdefault(variables.get(name), []).append(machine)
        if len(by_value) > 1:
            words = "; ".join(
                f"{'not set' if value is None else repr(value)} on {', '.join(machines)}"
                for value, machines in by_value.items()
            )
            findings.append(
                warning(
                    "fabric",
                    f"{name} is {words}",
                    f"Set it for all ranks alike, in the config: launch.env: {{{name}: …}}. "
                    "Where machines differ on purpose, all is well.",
                )
            )
    return findings
