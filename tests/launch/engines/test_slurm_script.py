"""The batch script of ``--on slurm`` as text: what it asks for, and that nothing breaks out of it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.config import Config, load
from paceline.errors import ConfigError
from paceline.launch.engines.base import ClusterJob
from paceline.launch.engines.slurm import SlurmEngine
from paceline.launch.engines.slurm_script import directive, quoted, script_of, with_index

HOSTILE = (
    *("'", '"', "`", "$(touch HURT)", "${HOME}", "\\", "\\\\", "\n", "\r\n", "\t", "\x1b[2J", "#"),
    *("\n#SBATCH --wrap=x\n", "#SBATCH --nodes=9", ";touch HURT;", "&&", "|", "> HURT", "*", "~"),
    *("../", "-", "--rdzv", " ", "%j", "%%", "{index}", "{", "}", "é", "日", "\u2028", "\udcff"),
    *("!", "a", "Z", "0", "=", ":", "\x7f", "\x01", "$'", "EOF", "<<EOF\n", "\n\n"),
)
FIELDS = ("partition", "account", "qos", "reservation", "constraint", "time", "gres", "memory")
FIELDS += ("job_name", "comment", "array", "python")


def job(*overrides: str, run: str = "/runs/run-1", **more: object) -> ClusterJob:
    config = load(None, ["launch.nproc=2", *overrides])
    return ClusterJob(
        config=config, train=("/home/my.yaml",), run=Path(run), folder=Path("/home"), **more
    )


def hostile(chance: random.Random) -> str:
    return "".join(chance.choice(HOSTILE) for _ in range(chance.randint(1, 8)))


def directives_in(script: str) -> list[str]:
    return [line for line in script.split("\n") if line.lstrip().startswith("#SBATCH")]


def test_asks_for_what_the_config_says() -> None:
    asked = job(
        "launch.nnodes=4",
        "launch.slurm.partition=gpu",
        "launch.slurm.account=lab",
        "launch.slurm.qos=high",
        "launch.slurm.reservation=tuesday",
        "launch.slurm.constraint=a100&ib",
        "launch.slurm.time=1-12:00:00",
        "launch.slurm.gpus_per_node=8",
        "launch.slurm.cpus_per_node=32",
        "launch.slurm.memory=0",
        "launch.slurm.exclusive=true",
        "launch.slurm.job_name=big",
        'launch.slurm.comment=a "quoted" word',
        'launch.slurm.extra=["--mail-type=END", "#SBATCH --nice=10"]',
        'launch.slurm.setup=["module load cuda", "source venv/bin/activate"]',
        "launch.slurm.python=python3",
    )
    script = script_of(asked)
    for line in [
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=32",
        "--gpus-per-node=8",
        "--mem=0",
        "--exclusive",
        "--time=1-12:00:00",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--reservation=tuesday",
        "--constraint=a100&ib",
        "--job-name=big",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        "--output=/runs/run-1/submission/slurm-%j.out",
        "--mail-type=END",
        "--nice=10",
    ]:
        assert f"#SBATCH {line}\n" in script
    assert '#SBATCH --comment="a \\"quoted\\" word"\n' in script
    assert "module load cuda\nsource venv/bin/activate\n" in script
    assert "python3 -m paceline train /home/my.yaml --on local --run-dir" in script
    assert '--rdzv "$rdzv" --nnodes 4 --secret-file /runs/run-1/submission/secret' in script
    assert SlurmEngine().gpus_per_machine(asked.config) == 8


def test_one_node_needs_no_rendezvous_and_a_range_no_fixed_number() -> None:
    alone = script_of(job("launch.slurm.requeue=false"))
    assert "rdzv" not in alone
    assert "#SBATCH --no-requeue\n" in alone
    elastic = script_of(job("launch.nnodes='2:4'"))
    assert "#SBATCH --nodes=2-4\n" in elastic
    assert "#SBATCH --no-kill\n" in elastic
    assert "--no-kill --wait=0" in elastic


def test_an_array_has_a_folder_and_a_value_for_each_run() -> None:
    array = job("launch.slurm.array=0-3%2", run="/runs/sweep")
    script = script_of(
        ClusterJob(
            **{**vars(array), "train": ("/a{index}.yaml", "--set", "seed={index}")},
        )
    )
    assert "#SBATCH --array=0-3%2\n" in script
    assert "slurm-%A_%a.out" in script
    assert 'run=/runs/sweep/"${SLURM_ARRAY_TASK_ID}"\n' in script
    assert "'/a{index}.yaml' --set seed=\"${SLURM_ARRAY_TASK_ID}\" " in script
    with pytest.raises(ConfigError, match=r"launch\.slurm\.array=0-3"):
        SlurmEngine().plan(ClusterJob(**{**vars(job()), "train": ("--set", "seed={index}")}))
    with pytest.raises(ConfigError, match="--resume auto"):
        SlurmEngine().plan(job("launch.slurm.array=0-3", resume=True))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("time=1h", "no time limit"),
        ("time=0", "no time at all"),
        ("array=3-1", "does not go upwards"),
        ("array=0-9%0", "how many run at a time"),
        ("partition='a b'", "cannot be a name in SLURM"),
        ("memory=lots", "no size of memory"),
        ('extra=["-N 3"]', "no option of sbatch"),
        ('extra=["--nodes=3"]', r"set by launch\.nnodes"),
        ('extra=["--nice=1\\n#SBATCH --wrap=x"]', "use one line"),
        ('setup=["#SBATCH --nice"]', r"launch\.slurm\.extra"),
        ('comment="a\\nb"', "use one line"),
    ],
)
def test_refused_values(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, [f"launch.slurm.{override}"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.slurm.gres=gpu:2", "launch.slurm.gpus_per_node=2"], "one or the other"),
        (["launch.slurm.time=2"], "as soon as it starts"),
        (["launch.grace=200"], "launch.grace"),
        (["launch.rdzv=a:1", "launch.nnodes=2"], "leave it out"),
    ],
)
def test_values_that_do_not_go_together(overrides: list[str], said: str) -> None:
    (problem,) = SlurmEngine().problems(load(None, overrides))
    assert said in problem


def test_gpus_of_a_kind_are_counted() -> None:
    def gpus(gres: str) -> int:
        return SlurmEngine().gpus_per_machine(load(None, [f"launch.slurm.gres='{gres}'"]))

    assert [gpus("gpu:4"), gpus("gpu:a100:2"), gpus("gpu"), gpus("tmp:1G,gpu:h100:3")] == [
        4,
        2,
        1,
        3,
    ]


FAKES = {
    # The first srun starts the launchers; another asks whether all nodes answer.
    "srun": """
        case "$*" in *--overlap*) test "$CASE" != node_lost; exit;; esac
        case "$CASE" in
            finished) exit 0;;
            failed) exit 1;;
            node_lost) exit 9;;
            preempted) exit 143;;
            limit | no_progress) kill -USR1 $PPID; while [ ! -e told ]; do /bin/sleep 0.02; done;;
            cancelled) kill -TERM $PPID; /bin/sleep 0.2;;
        esac
        exit 143""",
    "scancel": 'echo "scancel $*" >> said; touch told',
    "scontrol": 'echo "scontrol $*" >> said',
    "sleep": "exit 0",
    "asked": 'echo "asked $*" >> said; test "$CASE" != no_progress',
}
ASKED, REQUEUED = (
    "asked -m paceline.launch.engines.slurm_requeue /runs/run-1\n",
    "scontrol requeue 7\n",
)


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("finished", 0, ""),
        ("failed", 1, ""),
        ("node_lost", 9, REQUEUED),
        ("preempted", 143, ASKED.replace("\n", " --preempted\n") + REQUEUED),
        ("limit", 143, f"scancel --signal=TERM 7\n{ASKED}{REQUEUED}"),
        ("no_progress", 143, f"scancel --signal=TERM 7\n{ASKED}"),
        ("cancelled", 143, ""),
    ],
)
def test_what_follows_the_launchers(case: str, status: int, said: str, tmp_path: Path) -> None:
    """The script itself, with stand-ins for SLURM's commands."""
    for name, does in FAKES.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{does}\n")
        file.chmod(0o755)
    made = job("launch.slurm.python=asked")
    script = script_of(ClusterJob(**{**vars(made), "folder": tmp_path}))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CASE": case, "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], env={**env, "SLURM_JOB_NUM_NODES": "1"}, capture_output=True
    )
    assert done.returncode == status, done.stderr
    heard = tmp_path / "said"
    assert (heard.read_text() if heard.exists() else "") == said


def test_hostile_fields_are_refused_or_stay_in_their_line() -> None:
    chance = random.Random(1)
    taken = 0
    meant = len(directives_in(script_of(job())))
    for number in range(3000):
        field, text = FIELDS[number % len(FIELDS)], hostile(chance)
        slurm = Config().launch.slurm
        try:
            kind = type(slurm).model_validate({field: text})
        except ValueError:
            continue
        taken += 1
        base = job()
        launch = base.config.launch.model_copy(update={"slurm": kind})
        config = base.config.model_copy(update={"launch": launch})
        script = script_of(ClusterJob(**{**vars(base), "config": config}))
        assert len(directives_in(script)) == meant + (field in (*FIELDS[:8], "comment", "array"))
        assert (
            "HURT"
            not in "\n".join(line for line in script.split("\n") if not line.startswith("#SBATCH"))
            or field == "python"
        )
    assert taken > 100


def test_hostile_words_arrive_as_they_are(tmp_path: Path) -> None:
    """10,000 words in scripts that one bash reads: each is one argument, no line is a directive."""
    chance = random.Random(2)
    words = [hostile(chance) for _ in range(10_000)]
    lines = []
    for place in range(0, len(words), 100):
        some = words[place : place + 100]
        made = job(run=f"/runs/{place}", script_arguments=tuple(some))
        script = script_of(made)
        assert len(directives_in(script)) == len(directives_in(script_of(job())))
        (command,) = [line for line in script.split("\n") if " -m paceline train " in line]
        lines.append(f"printf '%s\\0' {command.removesuffix(' &')}")
    # A path, a value with the number of a run, and a directive's value that only sbatch reads.
    lines += [f"printf '%s\\0' {quoted(word)}" for word in words[:1000]]
    lines += [f"SLURM_ARRAY_TASK_ID=7; printf '%s\\0' {with_index(word)}" for word in words[:1000]]
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-s"],
        input="\n".join(lines).encode("utf-8", "surrogateescape"),
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    found = [os.fsdecode(part) for part in done.stdout.split(b"\0")[:-1]]
    arrived: list[str] = []
    for _ in range(0, len(words), 100):
        end = found.index("--") + 101
        arrived, found = [*arrived, *found[found.index("--") + 1 : end]], found[end:]
    assert arrived == words
    assert found[:1000] == words[:1000]
    assert found[1000:] == [word.replace("{index}", "7") for word in words[:1000]]
    assert not (tmp_path / "HURT").exists()


def test_hostile_folders_are_one_line_of_a_directive() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        text = hostile(chance)
        try:
            line = directive("output", text)
        except ConfigError:
            assert not text.isprintable()
            continue
        assert "\n" not in line
        assert line.startswith("#SBATCH --output=")
        assert _as_sbatch_reads(line.removeprefix("#SBATCH ")) == [f"--output={text}"]


def _as_sbatch_reads(text: str) -> list[str]:
    """The arguments of a directive: quotes hold together, a backslash takes the next as it is."""
    found, word, quote, escaped = [], "", "", False
    for character in text:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
            word += "" if not quote else character
        elif character in "\"'":
            quote = character
        elif character in " #":
            found, word = [*found, word], ""
            if character == "#":
                break
        else:
            word += character
    return [*found, word] if word else found
