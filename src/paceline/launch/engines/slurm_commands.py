"""SLURM's commands, run with a time limit, errors in their own words; and the states of jobs."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError, LaunchError
from paceline.untrusted import printable

_SECONDS = 60.0
_FIELD = re.compile(r"(?:^|\s)([A-Za-z:/]+)=(\S*)")
_OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
)
_HINTS = {
    "partition": "sinfo lists the partitions; name one with launch.slurm.partition",
    "account": "name one of yours with launch.slurm.account",
    "feature": "sinfo -o '%N %f' shows what the nodes have; see launch.slurm.constraint",
    "gres": "sinfo -o '%N %G' shows the GPUs of the nodes; see launch.slurm.gpus_per_node and gres",
    "qos": "name another with launch.slurm.qos",
    "time limit": "see launch.slurm.time; sinfo -o '%P %l' shows the longest of each partition",
    "node configuration is not available": "no node has what is asked for: compare "
    "launch.slurm.gpus_per_node, cpus_per_node, memory and constraint with sinfo -Nl",
    "controller": "is slurmctld up? scontrol ping says so; try again later",
}


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job, or of one job of an array."""

    job: str
    state: str
    """As SLURM writes it, like RUNNING."""
    reason: str = ""
    nodes: str = ""
    exit_code: str = ""
    restarts: int = 0
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether it will not run any more."""
        return self.state in _OVER

    def __str__(self) -> str:
        text = f"job {self.job} {self.state}"
        if self.state == "PENDING" and self.reason not in ("", "None"):
            text += f" ({self.reason})"
        elif self.state == "RUNNING" and self.nodes:
            text += f" on {self.nodes}"
        elif self.is_over and self.exit_code not in ("", "0:0"):
            text += f" (exit {self.exit_code})"
        if self.restarts:
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            text += f", requeued {times}"
        return text


def need(command: str) -> None:
    """Refuse where a command of SLURM is not here."""
    if shutil.which(command) is None:
        raise ConfigError(
            f"--on slurm: there is no {command} on this machine. Run the command on a login node "
            "of the cluster, or print the script with --dry-run and submit it there."
        )


def run_command(words: Sequence[str], *, seconds: float = _SECONDS) -> str:
    """What a command prints. ``LaunchError`` with its own words, and ours, where it fails."""
    need(words[0])
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{words[0]} did not answer within {seconds:g} s: is slurmctld up? scontrol ping says "
            "so. Try again later."
        ) from None
    if done.returncode:
        said = printable((done.stderr or done.stdout).strip()) or f"exit status {done.returncode}"
        raise LaunchError(f"{words[0]} refused it:\n{said}{_hint(said)}")
    return done.stdout


def _hint(said: str) -> str:
    found = [hint for word, hint in _HINTS.items() if word in said.lower()]
    return f"\nNext step: {found[0]}." if found else ""


def states_of(job: str, cluster: str = "") -> list[JobState]:
    """What SLURM knows of a job, one for each of an array; none where it has forgotten it."""
    where = [f"--clusters={cluster}"] if cluster else []
    try:
        shown = run_command(["scontrol", *where, "--oneliner", "show", "job", job])
    except LaunchError as error:
        if "Invalid job id" not in str(error):
            raise
        return _from_accounting(job, where)
    return [_of_line(line) for line in shown.splitlines() if line.startswith("JobId=")]


def _of_line(line: str) -> JobState:
    # The first of a name counts: a comment or a command may hold what looks like another.
    said: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        said.setdefault(name, value)
    index = said.get("ArrayTaskId")
    number = f"{said.get('ArrayJobId')}_{index}" if index else said.get("JobId", "")
    restarts = said.get("Restarts", "0")
    return JobState(
        job=number,
        state=said.get("JobState", "UNKNOWN"),
        reason=said.get("Reason", ""),
        nodes=said.get("NodeList", "").replace("(null)", ""),
        exit_code=said.get("ExitCode", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        details=said,
    )


def _from_accounting(job: str, where: Sequence[str]) -> list[JobState]:
    """The same from sacct, where the cluster keeps accounts."""
    fields = "JobID,State,NodeList,ExitCode"
    try:
        command = ["sacct", *where, "-n", "-P", "-X", "-j", job, "-o", fields]
        lines = run_command(command).splitlines()
    except (LaunchError, ConfigError):
        return []
    rows = [line.split("|") for line in lines if line.count("|") == 3]
    # "CANCELLED by 1000"
    return [JobState(row[0], row[1].split()[0], "", row[2], row[3]) for row in rows if row[1]]


def tell_step(job: str, name: str, signal_name: str) -> bool:
    """Send a signal to the launchers of the step of this name; whether there is one."""
    with contextlib.suppress(LaunchError):
        for line in run_command(["squeue", "-h", "-s", "-j", job, "-o", "%i %j"]).splitlines():
            number, _, called = line.strip().partition(" ")
            if called == name:
                run_command(["scancel", f"--signal={signal_name}", number])
                return True
    return False
