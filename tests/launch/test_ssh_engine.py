"""``--on ssh`` without a network: what it refuses, what ends up in commands, what is copied."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node_cases import wait_for

from paceline.config import load
from paceline.config.launch_engines import Ssh
from paceline.errors import ConfigError
from paceline.launch.engines import engine_named
from paceline.launch.engines.base import ClusterJob
from paceline.launch.engines.ssh.engine import run_id
from paceline.launch.engines.ssh.session import (
    ConnectionLost,
    RemoteSession,
    option_problems,
    remote_command,
    ssh_command,
)
from paceline.launch.engines.ssh.shipping import folders_of, pack, relocated
from paceline.launch.hosts import parse_host
from paceline.testing.processes import is_alive

ODD = ["'", '"', "`id`", "$(id)", "\n", "\r", ";", "&&", "|", "-o", "--", "../", "\\", " ", "\t"]
ODD += ["é", "\u202e", "\x1b[31m", "%s", "{}", "#", "~", "*", "!", "x", "1", "=", "\0", "<", ">"]


def problems(*overrides: str) -> list[str]:
    return engine_named("ssh").problems(load(None, ["launch.on=ssh", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "needs hosts"),
        (["launch.ssh.hosts=[n0:2,n1:2]", "launch.ssh.hostfile=/x"], "leave one of them out"),
        (["launch.ssh.hostfile=/no/such"], "cannot be read: No such file"),
        (["launch.ssh.hosts=[n0:2,n1:2]", "launch.nnodes=3"], "2 hosts are named"),
        (["launch.ssh.hosts=[n0:2,n1:2]", "launch.nnodes=1:3"], "2 hosts are named"),
        (["launch.ssh.hosts=[n0:2,n1:2]", "launch.nproc=4"], "2 slots each"),
        (["launch.ssh.hosts=[n0:2,n1:4]"], "same number of slots"),
        (["launch.ssh.hosts=[n0,n1]"], "--nproc 4"),
        (["launch.ssh.hosts=['-oProxyCommand=id:2']"], "is no host"),
        (["launch.ssh.hosts=[n0:2]", "launch.ssh.python='$(id)'"], "launch.ssh.python"),
        (["launch.ssh.hosts=[n0:2]", "launch.ssh.options=['-F x']"], "no option of ssh"),
        (["launch.ssh.hosts=[n0:2]", "launch.ssh.folder='~ada/x'"], "must begin with"),
        (["launch.ssh.hosts=[n0:2]", "launch.ssh.address='-x y'"], "no host or address"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], said: str) -> None:
    found = problems(*overrides)
    assert len(found) == 1
    assert said in found[0]


def test_hosts_say_how_many_machines_and_ranks() -> None:
    hosts = "launch.ssh.hosts=[n0:2,n1:2]"
    assert problems(hosts, "launch.nnodes=1:2", "launch.nproc=2") == []
    implied = engine_named("ssh").implied(load(None, [hosts]))
    assert implied == {"launch.nnodes": "2", "launch.nproc": "2"}
    assert engine_named("ssh").implied(load(None, [hosts, "launch.nnodes=1:2"])) == {
        "launch.nproc": "2"
    }


def test_no_value_breaks_out_of_a_command_line(tmp_path: Path) -> None:
    """What ssh's argv holds is fixed words and checked names; 10,000 odd values change nothing."""
    dice = random.Random(0)
    words, scripts = [], []
    for _ in range(10_000):
        value = "".join(dice.choices(ODD, k=dice.randint(1, 6)))
        ssh = Ssh.model_construct(
            **{**Ssh().model_dump(), "python": value, "options": [f"User={value}"], "setup": value}
        )
        bad = option_problems(ssh)
        if "python" not in " ".join(bad):
            scripts.append((value, remote_command(ssh)))
        if bad:
            continue
        try:
            host = parse_host(value)
        except ValueError:
            host = parse_host("node0")
        command = ssh_command(ssh, host)
        at = command.index("--")
        assert command[at + 1 :] == [host.name, remote_command(ssh)]
        words.append(shlex.join(command))
    assert scripts
    assert all(path.isascii() and not set(path) & set("'\"`$;&|<>() ") for path, _ in scripts)
    # What a plan prints can be typed: a shell makes the same words of it.
    job = _job(tmp_path, ["launch.ssh.hosts=[n0:2]"], train=("a\n$(id).yaml", "--set", "name='x`"))
    line = engine_named("ssh").plan(job).splitlines()[-2:]
    assert shlex.split("\n".join(line))[-10:].count("name='x`") == 1
    text = "\n".join(f"printf '%s\\0' {line}" for line in dict.fromkeys(words))
    done = subprocess.run(["bash"], input=text.encode(), capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()) or {p.name for p in tmp_path.iterdir()} <= {"runs"}
    seen = done.stdout.split(b"\0")[:-1]
    assert seen == [w.encode() for one in dict.fromkeys(words) for w in shlex.split(one)]


def _job(folder: Path, overrides: list[str], train: tuple[str, ...] = ()) -> ClusterJob:
    config = load(None, ["launch.on=ssh", *overrides])
    return ClusterJob(config=config, train=train, run=folder / "runs" / "r", folder=folder)


def test_what_is_copied(tmp_path: Path, monkeypatch) -> None:
    project = tmp_path / "project"
    for name in ("my.yaml", "model.py", "sub/more.py", ".git/x", "runs/a", ".venv/b", "c.pyc"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (project / "inside").symlink_to("model.py")
    (project / "outside").symlink_to("/etc/passwd")
    monkeypatch.chdir(project)
    job = _job(project, ["launch.ssh.hosts=[n0:2]"], train=(str(project / "my.yaml"),))
    code = folders_of(job)
    assert code.folders == (project,)
    archive = pack(code, 1)
    with archive.file:
        names = subprocess.run(["tar", "tz"], stdin=archive.file, capture_output=True).stdout
    listed = sorted(names.decode().split())
    assert listed == ["0-project/", *(f"0-project/{n}" for n in ("inside", "model.py", "my.yaml", "sub/more.py"))]  # fmt: skip
    assert relocated(job, code, "/there") == ["/there/0-project/my.yaml"]
    with (again := pack(code, 1)).file:
        assert again.digest == archive.digest
    (project / "model.py").write_text("other")
    with (changed := pack(code, 1)).file:
        assert changed.digest != archive.digest
    (project / "data.bin").write_bytes(b"0" * (2 << 20))
    with pytest.raises(ConfigError, match=r"data.bin.*most_mib"):
        pack(code, 1)
    if shutil.which("git"):
        shutil.rmtree(project / ".git")
        subprocess.run(["git", "init", "-q"], check=True)
        (project / ".gitignore").write_text("*.bin\n")
        with pack(code, 1).file as file:
            assert file
    other = _job(Path.home(), ["launch.ssh.hosts=[n0:2]"], train=(str(project / "my.yaml"),))
    assert folders_of(other).folders == (project,), "a home is no project"


def _session(tmp_path: Path) -> RemoteSession:
    """The other end of a connection, without the network between."""
    return RemoteSession(["sh", "-c", "echo Welcome; " + remote_command(Ssh())])


def _start(
    session: RemoteSession, folder: str, code: str, linger: float = 60, number: int = 0
) -> str:
    control = f"{folder}/host0-{number}"
    session.tell(
        {
            "do": "start",
            "control": control,
            "cwd": "/",
            "make": None,
            "setup": None,
            "command": [sys.executable, "-S", "-c", code],
            "secret": "s" * 40,
            "linger": linger,
            "patience": linger,
            "grace": 1,
        }
    )
    return control


PATIENT = """
import os, signal, sys, time
def leave(signum, frame):
    print("told", signal.Signals(signum).name, flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("here", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


def test_the_other_end(tmp_path: Path) -> None:
    """One launcher: told to end, left alone by a killed command, and found again by another."""
    said: list[str] = []
    session = _session(tmp_path)
    check = {"do": "check", "folder": str(tmp_path), "run": "r", "python": [sys.executable]}
    check |= {"setup": None, "cwd": "/", "marks": [str(tmp_path), "/no"], "ports": []}
    facts = session.ask(check)
    assert facts["sees"] == {str(tmp_path): True, "/no": False}
    assert facts["paceline"] is not None
    assert facts["torch"] is not None
    folder = facts["folder"]
    # Ended by an order; its output came, and the secret was its owner's alone.
    session.redirect(lambda text, offset: said.append(text))
    control = _start(session, folder, PATIENT)
    wait_for(lambda: said, "its output")
    secret = Path(control) / "secret"
    assert secret.read_text().strip() == "s" * 40
    assert secret.stat().st_mode & 0o777 == 0o600
    session.tell({"do": "beat"})
    session.tell({"do": "order", "what": "int"})
    assert session.answer(60)["exit"] == 130
    assert "told SIGINT" in "".join(said)
    assert not secret.exists()
    # The command is killed: the connection stands, its input is closed, and the launcher ends.
    said.clear()
    control = _start(session, folder, PATIENT, number=1)
    wait_for(lambda: said, "its output")
    launcher = int("".join(said).split()[1])
    assert session._process.stdin is not None
    session._process.stdin.close()
    wait_for(lambda: not is_alive(launcher), "the launcher to end", 60)
    session.close()
    # The connection is lost: the launcher goes on, and another connection takes it over.
    session = _session(tmp_path)
    session.redirect(lambda text, offset: said.append(text))
    said.clear()
    control = _start(session, folder, PATIENT, number=2)
    wait_for(lambda: said, "its output")
    launcher = int("".join(said).split()[1])
    os.killpg(session._process.pid, signal.SIGKILL)
    session.close()
    session = _session(tmp_path)
    states = session.ask({"do": "states", "folder": str(tmp_path), "run": "r"})
    assert states == {"launchers": [launcher]}
    assert "still has a launcher" not in str(facts)
    said.clear()
    session.redirect(lambda text, offset: said.append(text))
    session.tell({"do": "follow", "control": control, "offset": 0})
    wait_for(lambda: said, "its output again")
    assert f"here {launcher}" in "".join(said)
    other = _session(tmp_path)
    cancel = {"do": "order", "folder": str(tmp_path), "run": "r", "what": "kill"}
    assert other.ask(cancel) == {"launchers": [launcher]}
    other.close()
    assert session.answer(60)["exit"] == 137
    # Nobody comes back: after a while it ends by itself.
    said.clear()
    control = _start(session, folder, PATIENT, linger=0.5, number=3)
    wait_for(lambda: said, "its output")
    answer = session.answer(60)
    assert answer["exit"] == 143
    assert "nothing was heard for 0.5 s" in answer["why"]
    # Nor does what answers for it stay.
    assert session._process.wait(60) == 0
    session.close()
    session = _session(tmp_path)
    session.ask(
        {"do": "clean", "paths": [f"{folder}/host0-{n}" for n in range(4)], "folder": folder}
    )
    assert not Path(folder).exists()
    session.close()


def test_a_host_without_python_and_one_that_prints_nonsense() -> None:
    session = RemoteSession(["sh", "-c", remote_command(Ssh(python="/no/such/python"))])
    with pytest.raises(ConnectionLost, match=r"set launch\.ssh\.python"):
        session.ask({"do": "look", "names": []})
    session.close()
    session = RemoteSession(["sh", "-c", "cat >/dev/null & echo go away; exit 3"])
    with pytest.raises(ConnectionLost, match="go away"):
        session.ask({"do": "look", "names": []})
    session.close()


def test_ids_of_runs_can_be_names_of_folders(tmp_path: Path) -> None:
    for name in ("runs/é $(id)", "..", "x" * 300, "-rf"):
        found = run_id(tmp_path / name)
        assert found.isascii()
        assert "/" not in found
        assert len(found) < 60
