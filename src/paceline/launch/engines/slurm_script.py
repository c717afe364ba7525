"""The batch script of ``--on slurm``, as text: its directives, and one launcher on every node.

Values reach the script in two ways. In a directive, ``directive`` writes them in double quotes, as
sbatch reads them; in the body, ``quoted`` makes each of them one word of bash on one line. Lines of
``launch.slurm.setup`` alone are shell as it stands, which is what they are for.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from paceline.config.launch_engines import Slurm
from paceline.errors import ConfigError
from paceline.launch.engines.base import INDEX, ClusterJob
from paceline.version import __version__

SECRET = "secret"
"""The file in the folder of the submission that only the machines of the run may read."""
LAUNCHER_WAIT_SECONDS = 120
"""How long the other launchers may take, after one has ended, beyond the time they have to save."""
_OWN_INDEX = '"${SLURM_ARRAY_TASK_ID}"'
_PLAIN = re.compile(r"[A-Za-z0-9_.,:@%/+=&|*()\[\]-]*")


class ShellText(str):
    """A word that is put into the script as it stands; every other one is quoted."""


def script_of(job: ClusterJob) -> str:
    """The script for a run, or for the runs of an array."""
    slurm = job.config.launch.slurm
    several = job.nodes[1] > 1
    parts = [
        ["#!/bin/bash"],
        directives(job),
        [f"# Written by paceline {__version__}: one launcher on every node."],
        [f"cd {quoted(str(job.folder))} || exit 1"],
        ["# From launch.slurm.setup.", *slurm.setup] if slurm.setup else [],
        [f"run={_run(job)}"],
        _MEETING_PLACE.splitlines() if several else [],
        [_SIGNALS.format(**_settings(job))],
        [f"{' '.join(srun(job))} \\\n    {_words(_launcher(job))} &"],
        [_AFTERWARDS],
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def directives(job: ClusterJob) -> list[str]:
    """What sbatch reads: one option a line."""
    slurm = job.config.launch.slurm
    least, most = job.nodes
    cpus = slurm.cpus_per_node or launch_cpus(job)
    log = str(job.submission).replace("%", "%%")
    named: list[tuple[str, object]] = [
        ("job-name", slurm.job_name or job.run.name),
        ("nodes", most if least == most else f"{least}-{most}"),
        ("ntasks-per-node", 1),
        ("cpus-per-task", None if slurm.exclusive and not slurm.cpus_per_node else cpus),
        ("gpus-per-node", slurm.gpus_per_node),
        ("gres", slurm.gres),
        ("mem", slurm.memory),
        ("time", slurm.time),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("reservation", slurm.reservation),
        ("constraint", slurm.constraint),
        ("array", slurm.array),
        ("comment", slurm.comment),
        ("output", f"{log}/slurm-{'%A_%a' if slurm.array else '%j'}.out"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{slurm.save_before}"),
    ]
    lines = [directive(name, value) for name, value in named if value is not None]
    lines += ["#SBATCH --exclusive"] if slurm.exclusive else []
    lines += ["#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue"]
    # The launchers go on without a node that is lost: the job is not to be ended for it.
    lines += ["#SBATCH --no-kill"] if least < most else []
    return [*lines, *(f"#SBATCH {option}" for option in slurm.extra)]


def launch_cpus(job: ClusterJob) -> int | None:
    """One core for each rank of a node, as far as that is known here."""
    nproc = job.config.launch.nproc
    if isinstance(nproc, int):
        return nproc
    return job.config.launch.slurm.gpus_per_node


def directive(name: str, value: object) -> str:
    """The line of one option; ``ConfigError`` for a value that no line can hold."""
    text = str(value)
    if not text.isprintable():
        raise ConfigError(
            f"{text!r}: #SBATCH --{name} is one line, which cannot hold line breaks or control "
            "characters. Choose another name."
        )
    if not _PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}={text}"


def quoted(text: str) -> str:
    """One word of bash, on one line, whatever is in it."""
    if isinstance(text, ShellText):
        return text
    if "\0" in text:
        raise ConfigError(f"{text!r} holds a NUL, which no argument of a command can.")
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def with_index(text: str) -> str:
    """The same for a value in which ``{index}`` stands for the number of the run."""
    if INDEX not in text:
        return quoted(text)
    parts = text.split(INDEX)
    return _OWN_INDEX.join(quoted(part) if part else "" for part in parts)


def srun(job: ClusterJob, nodes: str = '"$SLURM_JOB_NUM_NODES"') -> list[str]:
    """The beginning of the command that starts a launcher on every node."""
    least, most = job.nodes
    if least < most:  # launchers come and go
        ends = ["--no-kill", "--wait=0"]
    else:
        # Not at once (-K): when one has saved and left, others may still be about it.
        ends = [f"--wait={LAUNCHER_WAIT_SECONDS + int(job.config.launch.grace)}"]
    one_each = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *one_each, "--cpu-bind=none", "--kill-on-bad-exit=0", *ends]


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _settings(job: ClusterJob) -> dict[str, str]:
    launch = job.config.launch
    most = "" if launch.max_preemptions is None else str(launch.max_preemptions)
    requeue = "yes" if launch.slurm.requeue else ""
    return {"python": quoted(_python(launch.slurm)), "requeue": requeue, "most": most}


def _python(slurm: Slurm) -> str:
    return slurm.python or sys.executable


def _run(job: ClusterJob) -> str:
    return quoted(str(job.run)) + ("/" + _OWN_INDEX if job.config.launch.slurm.array else "")


def _launcher(job: ClusterJob) -> list[str]:
    slurm = job.config.launch.slurm
    several = job.nodes[1] > 1
    words = job.launcher(
        python=_python(slurm),
        run=ShellText('"$run"'),
        rdzv=ShellText('"$rdzv"') if several else None,
        secret_file=str(job.submission / SECRET) if several else None,
    )
    if not slurm.array:
        return words
    return [
        ShellText(with_index(word)) if _may_vary(words, place, job) else word
        for place, word in enumerate(words)
    ]


def _may_vary(words: Sequence[str], place: int, job: ClusterJob) -> bool:
    """Whether ``{index}`` in this word is a number to be put in: what is set, not where it lies."""
    of_script = place >= len(words) - len(job.script_arguments)
    return of_script or (place > 0 and words[place - 1] == "--set")


def _words(words: Sequence[str]) -> str:
    return " ".join(map(quoted, words))


_MEETING_PLACE = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
getent hosts "$first" > /dev/null ||
    first=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
rdzv=$first:$((20000 + SLURM_JOB_ID * 64 % 10000))"""

_SIGNALS = """\
python={python} requeue={requeue} most={most}
say() {{ echo "paceline: $*" >&2; }}
leaving= heard= status=
# USR1 comes before the time limit, and TERM when the job is cancelled: then SLURM tells the
# launchers itself. Told to by SIGTERM, they save and leave.
trap 'heard=1; leaving=1; say "the time limit is near: the run saves and leaves";
      scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'heard=1; requeue=' TERM"""

_AFTERWARDS = """\
launchers=$!
while [ -z "$status" ]; do
    heard=
    wait "$launchers"
    code=$?
    [ -n "$heard" ] || status=$code
done
[ "$status" -eq 0 ] && exit 0
[ -n "$requeue" ] || exit "$status"
if [ -n "$leaving" ] || [ "$status" -eq 143 ]; then
    # They were told to leave: by this script; or by SLURM, which preempts the job, or cancels it
    # and tells this script as well.
    [ -n "$leaving" ] || { most="$most --preempted"; sleep 3; }
    [ -n "$requeue" ] && "$python" -m paceline.launch.engines.slurm_requeue "$run" $most &&
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
elif ! timeout 30 srun --overlap --ntasks-per-node=1 \\
        --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" true 2> /dev/null; then
    say "a node does not answer: SLURM is given time to notice it and to requeue the job"
    for _ in {1..60}; do sleep 10; done
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status\""""
