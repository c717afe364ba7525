"""Starting the ranks of a run on this machine, under torch's elastic agent.

``launch`` runs a command on every rank, ``call`` a function. Both return when all ranks
are done and leave no process behind, however they end:

- a rank fails: the others are ended, and all are started again if
  ``paceline.launch.restart_policy`` says so; otherwise ``RankFailed``
  carries the traceback of the one that failed first;
- SIGUSR1: passed on to the ranks, which save a checkpoint and go on;
- Ctrl-C, SIGTERM or SIGHUP: passed on to the ranks, which have ``grace`` seconds to save and leave;
  a second one kills them. Ctrl-C then surfaces as ``KeyboardInterrupt``, the others as
  ``SystemExit`` with 128 + the number of the signal;
- this process is killed: the ranks and all they started die with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import LaunchError, PacelineError, RankFailed
from paceline.events import EventLog
from paceline.launch import logs, process_reaper
from paceline.launch.environment import shared_variables
from paceline.launch.job import LocalJob, to_stderr, to_stdout
from paceline.launch.notices import NoticePipe
from paceline.launch.restart_policy import RestartLimits
from paceline.launch.signals import LauncherSignals, passed_on, stopping

if TYPE_CHECKING:
    from paceline.launch.agent import Agent
    from paceline.launch.hang_watcher import HangWatcher
    from paceline.launch.rendezvous.handler import LauncherRendezvous


def launch(job: LocalJob) -> None:
    """Run a job to its end; see the module for what is raised when it does not end well."""
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(LauncherSignals())
        stack.enter_context(_quiet_elastic())
        # Raised here, where no frame of the traceback keeps the agent and its port alive.
        error = _Launch(job, stack).run(signals)
    if error is not None:
        raise error


def call(
    function: Callable[[], Any],
    *,
    nproc: int,
    log_dir: Path | None = None,
    events_dir: Path | None = None,
    limits: RestartLimits | None = None,
    standby: bool = False,
    hang_watcher: Callable[[], HangWatcher] | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = 15.0,
    output: Callable[[str], None] | None = to_stdout,
    notice: Callable[[str], None] = to_stderr,
) -> Any:
    """Call ``function()`` on every rank and return what rank 0's call returned.

    The function, and what it refers to, may be defined in a script or a notebook: it is sent by
    value, and the script is not run again, so that it needs no ``__main__`` guard. Without a
    ``log_dir`` the logs are kept only if a rank fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-call-"))
    keep_logs = False
    try:
        job = LocalJob(
            command=["--call", str(folder)],
            nproc=nproc,
            log_dir=log_dir or folder / "logs",
            limits=limits or RestartLimits(),
            events_dir=events_dir,
            env=env or {},
            grace=grace,
            output=output,
            notice=notice,
            standby=standby,
            hang_watcher=hang_watcher,
        )
        write_payload(folder, function)
        launch(job)
        return read_value(folder)
    except RankFailed:
        keep_logs = log_dir is None
        raise
    finally:
        if keep_logs:
            (folder / "function.pkl").unlink()
        else:
            shutil.rmtree(folder)


class _Launch:
    """One launch: the agent in a thread, the caller's thread for signals and deadlines."""

    def __init__(self, job: LocalJob, stack: contextlib.ExitStack) -> None:
        self.job = job
        self.succeeded: bool | None = None
        self.error: BaseException | None = None
        self.relay = logs.Relay(job.output) if job.output else None
        self.notices = NoticePipe()
        stack.callback(self.notices.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        self.rank_logs = logs.RankLogs(job.log_dir, scratch, self._say)
        self.agent = self._make_agent(stack)

    def run(self, signals: LauncherSignals) -> BaseException | None:
        """Start the ranks, wait for their end, and return the error that came of it, if any."""
        thread = threading.Thread(target=self._run_agent, name="paceline-agent")
        try:
            self._supervise(thread, signals)
        finally:
            if thread.is_alive():  # an error of our own: still, nothing may be left running
                self.agent.request_stop(signal.SIGTERM)
                self.agent.kill()
                thread.join()
        if self.relay:
            self.relay.finish()
        self._say_notices()
        return self._outcome(signals)

    def _say_notices(self) -> None:
        for line in self.notices.take():
            self._say(line)

    def _supervise(self, thread: threading.Thread, signals: LauncherSignals) -> None:
        stopping = False
        while not self._over(thread, signals):
            if signals.first is not None and not stopping:
                stopping = True
                self.agent.request_stop(passed_on(signals.first))
                self._say_stopping(signals.first)
            if signals.insisted:
                self.agent.kill()
            if signals.take_save():
                self.agent.ask_to_save()
            self._say_notices()
            signals.note_end_of_program()
            thread.join(0.1)

    def _over(self, thread: threading.Thread, signals: LauncherSignals) -> bool:
        if thread.ident is not None:
            return not thread.is_alive()
        if signals.first is None:
            thread.start()
        return signals.first is not None

    def _make_agent(self, stack: contextlib.ExitStack) -> Agent:
        from paceline.launch.agent import Agent
        from paceline.launch.processes import Starter
        from paceline.launch.worker_group import LocalWorkerGroup

        changed = threading.Event()
        try:
            reaper = process_reaper.ProcessReaper()
            stack.callback(reaper.close)
            rdzv_handler = self._make_rendezvous(stack)
            stack.callback(rdzv_handler.shutdown)
            starter = Starter(
                self.job.command,
                {**shared_variables(self.job.nproc), **self.job.env, **self.notices.variables()},
                reaper=reaper,
                on_end=changed.set,
                inherited=[self.notices.writing],
            )
            return Agent(
                self.job,
                rdzv_handler,
                rank_logs=self.rank_logs,
                starter=starter,
                workers=LocalWorkerGroup(starter, self.rank_logs, reaper),
                changed=changed,
                on_start=self._ranks_started,
                say=self._say,
            )
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the ranks could not be started: {error}") from error

    def _make_rendezvous(self, stack: contextlib.ExitStack) -> LauncherRendezvous:
        from paceline.launch.rendezvous.handler import LocalRendezvous

        if self.job.rendezvous is not None:
            return self.job.rendezvous()
        if self.job.events_dir is None:
            return LocalRendezvous(self.job.host)
        events = EventLog(self.job.events_dir, self._say)
        stack.callback(events.close)
        return LocalRendezvous(self.job.host, events.write)

    def _run_agent(self) -> None:
        try:
            self.succeeded = not self.agent.run().is_failed()
        except Exception as error:
            self.error = error  # raised again by the caller's thread

    def _ranks_started(self, rank_0_is_here: bool) -> None:
        """Called in the agent's thread whenever the ranks have been started (again)."""
        if self.relay:
            self.relay.finish()  # it may have moved to another node
            if rank_0_is_here:
                self.relay.follow(self.rank_logs.log(0), self.rank_logs.quiet_point(0))

    def _say_stopping(self, signum: signal.Signals) -> None:
        self._say(stopping(signum, self.job.grace))

    def _say(self, message: str) -> None:
        # The terminal may be what has just gone; that must not keep the ranks from ending.
        with contextlib.suppress(OSError, ValueError):
            self.job.notice(message)

    def _outcome(self, signals: LauncherSignals) -> BaseException | None:
        if self.succeeded:
            return None
        if signals.first is not None:  # whatever else went wrong came of that
            return signals.as_error()
        if isinstance(self.error, PacelineError):
            return self.error
        if self.succeeded is None:
            return LaunchError(f"the ranks could not be started: {self.error}")
        return self.agent.error


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Torch's own messages (a warning per signal, a banner per failure) would bury ours."""
    # The second is where the agent writes its own events when nobody wants them.
    names = ("torch.distributed.elastic", "torchelastic-events-null")
    loggers = [logging.getLogger(name) for name in names]
    propagated = [logger.propagate for logger in loggers]
    swallow = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(swallow)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, value in zip(loggers, propagated, strict=True):
            logger.propagate = value
            logger.removeHandler(swallow)


def write_payload(folder: Path, function: Callable[[], Any]) -> None:
    """Put a function into ``folder``, for ranks to call it (``worker.call_payload``)."""
    import cloudpickle

    caller = {"path": sys.path, "argv": sys.argv}
    (folder / "caller.json").write_text(json.dumps(caller))
    try:
        payload = cloudpickle.dumps(function)
    except Exception as error:
        raise LaunchError(
            f"what should run on the ranks cannot be sent to them: {type(error).__name__}: "
            f"{error}. Models, datasets and functions that hold open files, locks or connections "
            "must make them on the rank instead, or be run with: paceline train --script"
        ) from error
    (folder / "function.pkl").write_bytes(payload)


def read_value(folder: Path) -> Any:
    """What rank 0's call of the function in ``folder`` returned."""
    import cloudpickle

    try:
        value = (folder / "value.pkl").read_bytes()
    except FileNotFoundError:
        raise LaunchError(
            "rank 0 left without returning a value (did the function call sys.exit?)."
        ) from None
    return cloudpickle.loads(value)
