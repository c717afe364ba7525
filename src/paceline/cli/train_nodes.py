"""``paceline train`` on several machines: the rendezvous, and the run folder they share."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.endpoints import endpoints
from paceline.config.fields import node_range
from paceline.errors import ConfigError, LaunchError
from paceline.events import Event, EventLog
from paceline.launch.allocation import started_by_tasks
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder, has_mark
from paceline.launch.secret import find_secret, open_to_strangers
from paceline.masking import shown
from paceline.untrusted import open_to_append, printable
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.launch.logs import LogName
    from paceline.launch.rendezvous.membership import RunInfo
    from paceline.launch.rendezvous.multi_node import MultiNodeRendezvous

_NOT_COMPARED = ("launch.rdzv", "launch.secret", "code")
"""Keys that each machine may spell in its own way."""
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass
class Joined:
    """This machine's part in a run of several machines."""

    rendezvous: MultiNodeRendezvous
    run: RunFolder
    resume: bool
    shared: bool
    """Whether the run's folder is the one that node 0 made, or this machine's own."""
    env: dict[str, str]

    @property
    def is_main(self) -> bool:
        """Whether this machine is node 0, which writes the run's events and shows them."""
        return self.rendezvous.node == 0

    def job_options(self, config: Config, *, is_script: bool = False) -> dict[str, Any]:
        """What a ``LocalJob`` needs to know of it."""
        options: dict[str, Any] = {
            "rendezvous": lambda: self.rendezvous,
            "host": self.rendezvous.host,
            "env": {**self.env, **config.launch.env},
        }
        if not is_script:
            options["usable_ranks"] = usable_ranks_of(config)
            options["events_dir"] = self.run.path if self.shared or self.is_main else None
        return options

    def where(self) -> str:
        """Which node this is, and where to look."""
        hosts = self.rendezvous.nodes
        me = f"node {self.rendezvous.node} of {len(hosts)} ({self.rendezvous.host})"
        if self.is_main:
            return f"{me}; with {', '.join(hosts[1:])}" if hosts[1:] else f"{me}, so far alone"
        return f"{me}; the run is shown on node 0 ({hosts[0]})"


class SharedRunFolder:
    """Makes the run's folder, or joins the one that another machine made; see ``RunHooks``."""

    def __init__(
        self,
        choice: RunChoice,
        *,
        config_text: str | None,
        checkpoint_where: str | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._choice, self._stack = choice, stack
        self._config_text = config_text
        self._checkpoint_where = checkpoint_where
        self._log: EventLog | None = None
        self.run: RunFolder | None = None
        self.shared = True
        self._goes_on = choice.resume is not None
        self.is_over: Callable[[], bool] = lambda: False

    def make(self) -> RunInfo:
        """Make the run's folder here; all machines get to know it."""
        from paceline.launch.rendezvous.membership import RunInfo

        run = RunFolder(Path(os.path.abspath(self._choice.make().path)))
        identity = uuid.uuid4().hex
        places = self._checkpoint_places(run)
        self._hold(run, identity)
        self._goes_on = self._choice.goes_on(run)
        run.mark(identity, places)
        self._stack.callback(self._unmark, run, identity, places)
        self._save_config(run)
        return RunInfo(str(run.path), identity, tuple(places), self._goes_on)

    def take(self, run: RunInfo) -> None:
        """Take part in a run that another machine made, in its folder or in one like it.

        Nothing is written to a folder that this launcher was not asked to use.
        """
        folder = self._choice.take(run.path)
        self._goes_on = run.resume
        places = self._checkpoint_places(folder)
        if places != list(run.checkpoint_folders):
            raise ConfigError(
                "the machines that meet here write checkpoints to "
                f"{_listed(run.checkpoint_folders)}, but this one was asked for {_listed(places)}. "
                "Start all of them with the same command."
            )
        for place in places:
            if not has_mark(place, run.identity):
                raise ConfigError(_unseen(place))
        self.shared = has_mark(run.path, run.identity)
        if not self.shared:
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"run folder {run.path!r}, made by another machine, cannot be made here: "
                    f"{error.strerror or error}. Choose one that every machine can have, with "
                    "--run-dir or track.run_dir."
                ) from error
        self._hold(folder, run.identity)
        self._stack.callback(self._unmark, folder, run.identity, places)
        if not self.shared:
            self._save_config(folder)

    def write(self, event: Event) -> None:
        """Append to the run's events; called on node 0 alone."""
        if self._config_text is None:
            return  # a script's run has no events
        assert self.run is not None
        if self._log is None:
            self._log = EventLog(self.run.path, _say)
            self._stack.callback(self._log.close)
        self._log.write(event)

    def keep_log(self, name: LogName, host: str, data: bytes) -> None:
        """Append to the copy of a log of another machine."""
        assert self.run is not None
        path = name.path(self.run.logs, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(path), "ab") as file:
            file.write(data)

    def _hold(self, run: RunFolder, identity: str) -> None:
        self._stack.enter_context(run.in_use(identity))
        self.run = run

    def _unmark(self, run: RunFolder, identity: str, places: Sequence[str]) -> None:
        """Take the marks away where the run is over; others may yet join one that goes on."""
        if self.is_over():
            run.unmark(identity, places)

    def _save_config(self, run: RunFolder) -> None:
        """Of a new run. One that goes on has settings, which stay until its ranks take new ones."""
        if self._config_text is not None and not self._goes_on:
            run.save_config(self._config_text)

    def _checkpoint_places(self, run: RunFolder) -> list[str]:
        """The folder of checkpoints, which all machines must see; a URL is seen by all."""
        where = self._checkpoint_where
        if self._config_text is None or (where is not None and "://" in where):
            return []
        return [str(run.path / (where or run.checkpoints.name))]


def meet_about(
    config: Config,
    choice: RunChoice,
    stack: contextlib.ExitStack,
    script: str | None = None,
) -> Joined:
    """Meet the launchers of the other machines, and agree with them on the run."""
    from paceline.config import dump
    from paceline.config.keys import flat

    is_script = script is not None
    nodes = SharedRunFolder(
        choice,
        config_text=None if is_script else dump(config),
        checkpoint_where=config.checkpoint.where,
        stack=stack,
    )
    settings = {"launch": config.launch.model_dump()} if is_script else config.model_dump()
    more = {"--script": script} if script is not None else {}
    return meet(config, nodes, asked_of(flat(settings), **more), stack)


def meet(
    config: Config,
    nodes: SharedRunFolder,
    asked: Mapping[str, str],
    stack: contextlib.ExitStack,
) -> Joined:
    """The first rendezvous with the other machines; returns when a world has formed."""
    env = _quiet_torch()
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from paceline.launch.rendezvous.forwarding import LogTail
    from paceline.launch.rendezvous.joining import RendezvousSettings, RunHooks
    from paceline.launch.rendezvous.multi_node import MultiNodeRendezvous

    launch = config.launch
    least, most = node_range(launch.nnodes)
    assert launch.rdzv is not None
    assert isinstance(launch.nproc, int)
    settings = RendezvousSettings(
        endpoints=endpoints(launch.rdzv),
        min_nodes=least,
        max_nodes=most,
        node_timeout=launch.node_timeout,
        rejoin_timeout=launch.rejoin_timeout,
        nproc=launch.nproc,
        asked=asked,
        secret=find_secret(launch.secret),
    )
    if (warning := open_to_strangers(settings.endpoints, settings.secret)) is not None:
        _say(f"warning: {warning}")
    if len(settings.endpoints) > 1 and 2 * least <= most:
        _say(
            f"warning: launch.rdzv names a stand-in, and {least} of {most} machines may go on "
            "alone: if the network between them breaks, both sides will. A least number of "
            f"{most // 2 + 1} (--nnodes {most // 2 + 1}:{most}) rules that out."
        )
    hooks = RunHooks(nodes.make, nodes.take, nodes.write, nodes.keep_log, _say)
    rendezvous = MultiNodeRendezvous(settings, hooks)
    nodes.is_over = rendezvous.is_closed
    stack.callback(rendezvous.shutdown)
    try:
        rendezvous.open()
    except RendezvousError as error:
        raise LaunchError(f"the machines could not meet: {error}") from None
    assert nodes.run is not None
    assert rendezvous.run is not None
    if not nodes.shared:
        rendezvous.forwarder.logs = LogTail(nodes.run.logs, rendezvous.host)
    return Joined(rendezvous, nodes.run, rendezvous.run.resume, nodes.shared, env)


def refuse_copies(config: Config) -> None:
    """Refuse to start where SLURM or MPI starts this command several times, a run each time."""
    if (started := started_by_tasks()) is None:
        return
    name, tasks = started
    most = node_range(config.launch.nnodes)[1]
    if config.launch.rdzv is None:
        raise ConfigError(
            f"{name} started paceline train {tasks} times, and each would start a run of its own. "
            f"Start it once, outside of {name}; or once on each machine, and have them meet: "
            f"paceline train --nnodes {tasks} --rdzv HOST:PORT. A script that {name} starts once "
            "for each rank needs no paceline train: have it call World.init()."
        )
    if tasks > most:
        raise ConfigError(
            f"{name} started paceline train {tasks} times, but launch.nnodes={config.launch.nnodes}"
            f": one on each machine is enough. Start {most} tasks, or set --nnodes {tasks}."
        )


def asked_of(config: Mapping[str, Any], **more: str) -> dict[str, str]:
    """What a launcher was asked to run, in a form to compare it with what others were."""
    compared = {key: value for key, value in config.items() if key not in _NOT_COMPARED}
    flat = {
        key: repr(shown(value, key.rpartition(".")[2], bare_key=".storage." in key))
        for key, value in compared.items()
    }
    return {**flat, "paceline's version": __version__, **more}


def usable_ranks_of(config: Config) -> Callable[[int], int]:
    """How many ranks of a world the config's layout uses, by ``launch.shrink``; 0 is: wait."""
    from paceline.layout import Layout
    from paceline.layout.fitting import fit

    whole = Layout.parse(config.layout)

    def usable_ranks(ranks: int) -> int:
        fitted = fit(whole, ranks)
        if fitted is None or (config.launch.shrink == "wait" and fitted != whole):
            return 0
        return fitted.world_size

    return usable_ranks


def _listed(places: Sequence[str]) -> str:
    return ", ".join(map(repr, places)) or "no folder"


def _unseen(place: str) -> str:
    return (
        f"checkpoint folder {place!r} is not the same folder here as on the machine that made it, "
        "but all machines write their parts of a checkpoint there. Name one that all of them see: "
        "--set checkpoint.where=/a/shared/folder or checkpoint.where=s3://bucket/run; or put the "
        "whole run on a shared disk with track.run_dir."
    )


def _quiet_torch() -> dict[str, str]:
    """Keep torch's C++ from printing a stack for every connection that is lost.

    A lost connection is what launchers are there for. Returns what ranks are to have instead.
    """
    before = os.environ.get(_TORCH_LOG_LEVEL)
    if before is not None or "torch" in sys.modules:
        return {}
    os.environ[_TORCH_LOG_LEVEL] = "FATAL"
    return {_TORCH_LOG_LEVEL: "WARNING"}


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(printable(message), file=sys.stderr, flush=True)
