"""Which hosts a run has, kept in the user's own folder: a run's folder may come from anybody.

What is in a run's folder is data, and contacts nobody. The hosts of a run, and the options of ssh
by which they are reached (some of which name commands), are therefore kept in
``~/.local/state/paceline/ssh``, for ``paceline runs status`` and ``cancel``.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.config.launch_engines import Ssh
from paceline.errors import ConfigError
from paceline.launch.engines.ssh.session import ConnectionLost, RemoteSession, ssh_command
from paceline.launch.engines.submission import state_folder
from paceline.launch.hosts import HostSlots
from paceline.untrusted import parse_json, read_bytes, write_private

_MOST_BYTES = 4 << 20
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class RunOfHosts:
    """A run, its hosts, and how they are reached."""

    run_id: str
    ssh: Ssh
    hosts: tuple[HostSlots, ...]

    def save(self) -> None:
        """Keep it for later commands."""
        path = _path(self.run_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record = {"ssh": self.ssh.model_dump(), "hosts": [asdict(host) for host in self.hosts]}
        write_private(path, json.dumps(record).encode())

    def forget(self) -> None:
        """Nothing of the run is left on its hosts."""
        _path(self.run_id).unlink(missing_ok=True)

    @classmethod
    def load(cls, run_id: str) -> RunOfHosts | None:
        """What was kept; ``None`` where nothing was, or the run has ended on all hosts."""
        path = _path(run_id)
        try:
            record = parse_json(read_bytes(path, _MOST_BYTES))
            hosts = tuple(HostSlots(**host) for host in record["hosts"])
            return cls(run_id, Ssh(**record["ssh"]), hosts)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{str(path)!r} cannot be used: {error}") from None


def ask_hosts(record: RunOfHosts, order: str | None = None) -> list[tuple[str, str]]:
    """What each host says of a run's launcher; with an ``order`` it is told that first."""

    def ask(host: HostSlots) -> tuple[str, str]:
        session = RemoteSession(ssh_command(record.ssh, host))
        request = {"do": "states", "folder": record.ssh.folder, "run": record.run_id}
        if order is not None:
            request |= {"do": "order", "what": order}
        try:
            found = session.ask(request, seconds=_ANSWER_SECONDS)["launchers"]
        except ConnectionLost as error:
            return str(host), f"cannot be asked: {error}"
        finally:
            session.close()
        if not found:
            return str(host), "no launcher"
        pids = ", ".join(str(int(pid)) for pid in found)
        return str(host), f"launcher {pids} runs" if order is None else f"launcher {pids} is ending"

    with ThreadPoolExecutor(min(64, len(record.hosts))) as pool:
        return list(pool.map(ask, record.hosts))


def _path(run_id: str) -> Path:
    return state_folder("ssh") / f"{run_id}.json"
