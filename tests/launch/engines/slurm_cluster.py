"""A real SLURM on this machine: slurmctld and two slurmd nodes, n1 and n2, of Debian's slurm-wlm.

Everything lies in one folder, ports are its own, and so is the munge daemon: several clusters may
run side by side. To try things by hand: ``python slurm_cluster.py FOLDER``, then
``SLURM_CONF=FOLDER/slurm.conf sinfo``.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.testing import leaks

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
_PATIENCE = 300.0
_CONF = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ctl}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=20
MinJobAge=600
SchedulerParameters=sched_min_interval=100000
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=4 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""


def missing() -> list[str]:
    """The programs of SLURM that are not here; tests are skipped where there are any."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SlurmCluster:
    """Daemons that run until the ``with`` ends; what they started ends with them."""

    def __init__(self, folder: Path, *, slurmd_timeout: int = 10) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._slurmd_timeout = slurmd_timeout
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(socket.create_server(("", 0))) for _ in range(3)]
            ctl, n1, n2 = (port.getsockname()[1] for port in ports)
        self.conf.write_text(
            _CONF.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                slurmd_timeout=self._slurmd_timeout,
                ctl=ctl,
                n1=n1,
                n2=n2,
            )
        )
        try:
            self._start("munged", "--foreground", "--force", *self._munge_files())
            wait_for((self.folder / "munge.socket").exists, "munged")
            self._start_controller()
            for node in ("n1", "n2"):
                self.start_node(node)
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.command("squeue", "-h", "-a", "-o", "%A", check=False).split():
            self.command("scancel", "--signal=KILL", "--full", job, check=False)
            self.command("scancel", job, check=False)
        for name in reversed(list(self._daemons)):
            self._end(name)
        wait_for(lambda: not self._end_rest(), "processes of the cluster to end")

    def start_controller(self) -> None:
        """Start slurmctld again, and wait until it has heard of its nodes."""
        self._start_controller()
        self._wait_until_idle()
        pid = self._daemons["slurmctld"].pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            leaks.serves_the_session(int(child))  # slurmscriptd

    def stop_controller(self) -> None:
        """End slurmctld; the nodes go on without it."""
        self._end("slurmctld")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", "-D", "-f", str(self.conf), "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """SIGKILL a node: its slurmd, and every process of a job on it."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        while found := list(self._processes(node)):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def environment(self) -> dict[str, str]:
        """The environment in which SLURM's commands find this cluster."""
        ours = ("SLURM", "SBATCH", "SRUN", "SALLOC")
        env = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
        return {**env, "SLURM_CONF": str(self.conf)}

    def command(self, *words: str, check: bool = True) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=_PATIENCE
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job."""
        text = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_for_state(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job has one of these states; one that waits to be requeued is hurried.

        But not before its last processes are gone: SLURM would take their end for the new ones'.
        """

        def there() -> bool:
            shown = self.job(job)
            waits = shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime"
            if waits and not any(self._processes(None)):
                self.command("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            return shown["JobState"] in states

        try:
            wait_for(there, f"job {job} to be {' or '.join(states)}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.job(job)}") from None
        return self.job(job)

    def bring_time_limit_near(self, job: str) -> None:
        """Have a running job end within a minute or two, by its time limit."""
        hours, minutes, _ = self.job(job)["RunTime"].split(":")
        limit = int(hours) * 60 + int(minutes) + 1
        self.command("scontrol", "update", f"jobid={job}", f"TimeLimit={limit}")

    def _start_controller(self) -> None:
        self._start("slurmctld", "-D", "-f", str(self.conf), "-i", name="slurmctld")

    def _wait_until_idle(self) -> None:
        shown = ("sinfo", "-h", "-o", "%D %t")
        wait_for(lambda: self.command(*shown, check=False) == "2 idle", "idle nodes")

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        path = _program(program)
        assert path is not None, f"{program} is not installed"
        with open(self.folder / f"{name or program}.out", "ab") as out:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        # Started in a test, it may serve the next ones.
        leaks.serves_the_session(self._daemons[name or program].pid)

    def _munge_files(self) -> Sequence[str]:
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        return [f"--{option}={self.folder / file}" for option, file in files.items()]

    def _end(self, name: str) -> None:
        if (daemon := self._daemons.pop(name, None)) is not None:
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _processes(self, node: str | None) -> Iterator[int]:
        """Processes of jobs: those that were given a node, and the slurmstepds over them."""
        conf = f"SLURM_CONF={self.conf}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = (folder / "environ").read_bytes().split(b"\0")
                title = (folder / "cmdline").read_bytes()
                of_node = f"SLURMD_NODENAME={node}".encode()
                in_job = any(text.startswith(b"SLURMD_NODENAME=") for text in env)
                is_ours = conf in env and (of_node in env or (in_job and node is None))
                is_step = title.startswith(b"slurmstepd")
                if is_ours or (is_step and self._is_over(int(folder.name), node)):
                    yield int(folder.name)

    def _is_over(self, pid: int, node: str | None) -> bool:
        """Whether a slurmstepd is one of this cluster's (and node's)."""
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                spool = self.folder / (f"spool-{node}" if node else "spool")
                if os.readlink(link).startswith(str(spool)):
                    return True
        return False

    def _end_rest(self) -> list[int]:
        rest = list(self._processes(None))
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return rest


def wait_for(
    look: Callable[[], object], what: str | Callable[[], str], seconds: float = _PATIENCE
) -> None:
    """Wait until ``look`` returns something true; ``what`` says what was waited for."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {seconds:g} s for {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.1)


if __name__ == "__main__":
    with SlurmCluster(Path(sys.argv[1])) as cluster:
        print(f"SLURM_CONF={cluster.conf}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
