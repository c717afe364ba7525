"""``--on ssh`` on two hosts with a real sshd each: run, kill, cut off, interrupt, copy, refuse."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_cases import same_losses, wait_for
from ssh_hosts import SshHosts, SshRun, local_losses, losses_in, unavailable

from paceline import events
from paceline.events import RanksStarted

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Iterator[SshHosts]:
    with contextlib.ExitStack() as stack:
        yield SshHosts(tmp_path_factory.mktemp("ssh"), stack)


@pytest.fixture(autouse=True)
def _whole(there: SshHosts) -> Iterator[None]:
    """Each test finds both hosts as they were."""
    yield
    for node in there.nodes:
        node.heal()
        there.serve_again(node)
    for process in there.commands:
        if process.poll() is None:
            process.kill()
            process.wait()
    there.commands.clear()
    there.end_what_is_left()


def test_two_hosts_compute_what_local_ranks_do(there: SshHosts) -> None:
    run = SshRun(there, there.folder / "same").start()
    secrets = wait_for(there.secrets, f"the run's secret\n{run.text}")
    assert all(mode == 0o600 and len(text) >= 32 for mode, text in secrets)
    lines = there.command_lines()
    assert not any(text.encode() in line for line in lines for _, text in secrets)
    assert run.ends() == 0, run.text
    assert "node0 | " in run.text
    assert "node1 | " in run.text
    assert any(
        line.startswith(("node0 | step 6/6", "node1 | step 6/6")) for line in run.text.splitlines()
    )
    assert there.left() == []
    assert there.secrets() == []
    assert run.losses() == local_losses(run.folder, ["--nproc", "2"])
    folder = run.run_folder()
    logs = run.command_of("runs", "logs", str(folder))
    assert "step 6/6" in logs.stdout
    status = run.command_of("runs", "status", str(folder))
    assert "ssh: followed by no process here" in status.stdout, status.stderr
    assert "finished" in status.stdout


def test_a_host_is_killed_and_comes_back_and_ctrl_c_ends_all(there: SshHosts, undisturbed) -> None:
    run = SshRun(there, there.folder / "killed", "--nnodes", "1:2", steps=400, slow=0.1).start()
    run.reaches(2)
    folder = run.run_folder()
    status = run.command_of("runs", "status", str(folder)).stdout
    assert f"followed by process {run.process.pid}" in status
    assert "node0: launcher" in status
    again = SshRun(there, run.folder, "--run-dir", str(folder), "--resume", "auto", write=False)
    assert again.start().ends() == 2
    assert f"is followed by process {run.process.pid} already" in again.text
    there.kill(there.nodes[1])
    wait_for(lambda: worlds(folder)[-1] == 1, f"a world without it\n{run.text}")
    before = max(run.losses())
    run.reaches(before + 2)
    assert "node1 | no connection" in run.text
    there.serve(there.nodes[1])
    wait_for(lambda: worlds(folder)[-1] == 2, f"a world with it again\n{run.text}")
    run.reaches(max(run.losses()) + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.text
    wait_for(lambda: there.left() == [], "everything to end", 30)
    losses = run.losses()
    same_losses(losses, {step: undisturbed[step] for step in losses})
    assert there.secrets() == []


def test_ctrl_c_while_a_link_is_down(there: SshHosts) -> None:
    run = SshRun(there, there.folder / "cut", "--set", "launch.ssh.linger=6", steps=400, slow=0.1)
    run.start().reaches(2)
    there.nodes[1].cut()
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.text
    assert "node1" in run.text.partition("ending the run on all hosts")[2]
    # Nobody can tell the host: it ends by itself, while its link is still down.
    wait_for(lambda: there.left_but_sshd() == [], "all to end", 90)


def test_the_command_is_killed(there: SshHosts) -> None:
    folder = there.folder / "kill9"
    folder.mkdir()
    (folder / "wait.py").write_text("import time\nprint('it waits', flush=True)\ntime.sleep(600)\n")
    run = SshRun(there, folder, hosts="node0:1", write=False)
    run.command[4:5] = ["--script", "wait.py"]
    run.start()
    wait_for(lambda: "node0 | it waits" in run.text, f"the script\n{run.text}")
    run.process.kill()
    run.process.wait()
    wait_for(lambda: there.left_but_sshd() == [], "all to end", 60)


def test_code_is_copied_where_nothing_is_shared(there: SshHosts) -> None:
    project = there.own / "project"
    source = SshRun(there, there.folder / "source")
    there.control.run(["cp", "-r", str(source.folder), str(project)], check=True)
    (there.folder / "shared").mkdir()
    more = ["--set", f"checkpoint.where={there.folder}/shared", "--run-dir", "runs/copied"]
    more += ["--set", "launch.ssh.interactive=true"]  # which nobody is asked for, with a key
    run = SshRun(there, project, *more, write=False).start()
    assert run.ends() == 0, run.text
    assert "copying" in run.text
    run.text.index("files of the run were copied from")
    back = there.folder / "back.jsonl"
    events_file = project / "runs" / "copied" / events.FILE_NAME
    there.control.run(["cp", str(events_file), str(back)], check=True)
    assert losses_in(back) == local_losses(source.folder, ["--nproc", "2"])
    assert there.left() == []
    for node in there.nodes:
        listed = node.run(["find", str(there.own)], capture_output=True, text=True).stdout
        assert "code-" not in listed, "the copy is gone"
        assert "/run/config.yaml" in listed, "the run itself stays"


def test_hosts_that_cannot_take_part_are_listed(there: SshHosts) -> None:
    fake = there.folder / "fake"
    (fake / "paceline").mkdir(parents=True)
    (fake / "paceline" / "__init__.py").touch()
    (fake / "paceline" / "version.py").write_text("__version__ = '0.0.1'\n")
    python = fake / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={fake} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cases = {
        "key": (["node0:1,node1:1", "stranger.conf"], [], "node1  cannot be used over ssh: root@node1: Permission denied"),
        "name": (["node0:1,nowhere:1", "client.conf"], [], "nowhere  cannot be used over ssh: ssh: Could not resolve hostname nowhere"),
        "version": (["node0:1,node1:1", "client.conf"], ["--set", f"launch.ssh.python={python}"], "has paceline 0.0.1"),
        "folder": (["node0:1,node1:1", "client.conf"], ["--set", "launch.ssh.folder=/proc/no"], "node0  cannot be used over ssh: [Errno 2]"),
    }  # fmt: skip
    runs = {
        name: SshRun(there, there.folder / name, *more, hosts=hosts, client=client).start()
        for name, ((hosts, client), more, _) in cases.items()
    }
    for name, run in runs.items():
        assert run.ends() != 0
        assert "nothing was started" in run.text
        assert cases[name][2] in run.text, run.text
        assert "Traceback" not in run.text
    assert there.left() == []


def worlds(folder: Path) -> list[int]:
    found = events.read(folder / events.FILE_NAME)
    return [0, *(event.world_size for event in found if isinstance(event, RanksStarted))]
