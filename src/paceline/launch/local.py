"""Starting the ranks of a run on this machine, under torch's elastic agent.

:func:`launch` runs a command on every rank, :func:`call` a function. Both return when all ranks
are done and leave no process behind, however they end:

- a rank fails: the others are ended, and all are started again if :mod:`paceline.launch.policy`
  says so; otherwise :class:`~paceline.errors.RankFailed` carries the traceback of the one that
  failed first;
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
import os
import platform
import shutil
import signal
import site
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.errors import LaunchError, PacelineError, RankFailed
from paceline.events import EventLog
from paceline.launch import guard, logs
from paceline.launch.capacity import check_nproc
from paceline.launch.environment import COLLECTIVES_REMEMBERED, FLIGHT_RECORDER
from paceline.launch.notices import Notices
from paceline.launch.policy import Limits
from paceline.untrusted import printable

if TYPE_CHECKING:
    from paceline.launch.agent import Agent
    from paceline.launch.overseer import Overseer
    from paceline.launch.rendezvous.handler import LauncherRendezvous

# Wrappers (uv, make, timeout) pass on a Ctrl-C that the terminal has already sent to everyone: a
# repetition this soon is an echo, not an impatient user.
_ECHO_SECONDS = 0.5


def to_stdout(text: str) -> None:
    """Show what rank 0 writes, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def to_stderr(message: str) -> None:
    """Show what the launcher has to say."""
    print(printable(message), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LocalJob:
    """What to run on how many ranks of this machine.

    ``command`` is what follows ``python -m paceline.launch.worker``: ``["script", FILE, *args]``,
    ``["-m", MODULE, *args]`` or ``["--call", FOLDER]``. Logs go to ``log_dir/rank<r>.log``, those
    of later starts (a restart, a resumed run) to ``log_dir/attempt<k>/rank<r>.log``. With an
    ``events_dir`` the launcher adds its own events to the run's. ``output`` gets rank 0's output
    as it comes (``None``: only the log does), ``notice`` what the launcher has to say.

    ``limits`` say how often ranks are started again; with ``standby``, processes are kept ready for
    it. ``rendezvous`` makes the place to meet the launchers of other nodes (``None``: there are
    none), ``host`` is the name of this one; ``node_logs`` puts each node's logs into a folder of
    its own when there are several. ``places`` says how many ranks of a world of a given size are
    used (``None``: all). ``overseer`` makes what watches the ranks for hangs.
    """

    command: Sequence[str]
    nproc: int
    log_dir: Path
    limits: Limits = field(default_factory=Limits)
    events_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 15.0
    output: Callable[[str], None] | None = to_stdout
    notice: Callable[[str], None] = to_stderr
    standby: bool = False
    rendezvous: Callable[[], LauncherRendezvous] | None = None
    host: str = field(default_factory=platform.node)
    node_logs: bool = True
    places: Callable[[int], int] | None = None
    overseer: Callable[[], Overseer] | None = None

    def __post_init__(self) -> None:
        check_nproc(self.nproc)
        if self.grace < 0:
            raise LaunchError(f"grace={self.grace} must be 0 seconds or more.")


def launch(job: LocalJob) -> None:
    """Run a job to its end; see the module for what is raised when it does not end well."""
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_Signals())
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
    limits: Limits | None = None,
    standby: bool = False,
    overseer: Callable[[], Overseer] | None = None,
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
            limits=limits or Limits(),
            events_dir=events_dir,
            env=env or {},
            grace=grace,
            output=output,
            notice=notice,
            standby=standby,
            overseer=overseer,
        )
        _write_payload(folder, function)
        launch(job)
        return _read_value(folder)
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
        self.notices = Notices()
        stack.callback(self.notices.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        self.rank_logs = logs.RankLogs(job.log_dir, scratch, self._say)
        self.agent = self._make_agent(stack)

    def run(self, signals: _Signals) -> BaseException | None:
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

    def _supervise(self, thread: threading.Thread, signals: _Signals) -> None:
        stopping = False
        while not self._over(thread, signals):
            if signals.first is not None and not stopping:
                stopping = True
                self.agent.request_stop(_passed_on(signals.first))
                self._say_stopping(signals.first)
            if signals.insisted:
                self.agent.kill()
            if signals.take_save():
                self.agent.ask_to_save()
            self._say_notices()
            signals.note_end_of_program()
            thread.join(0.1)

    def _over(self, thread: threading.Thread, signals: _Signals) -> bool:
        if thread.ident is not None:
            return not thread.is_alive()
        if signals.first is None:
            thread.start()
        return signals.first is not None

    def _make_agent(self, stack: contextlib.ExitStack) -> Agent:
        from paceline.launch.agent import Agent
        from paceline.launch.crew import Crew
        from paceline.launch.processes import Starter

        changed = threading.Event()
        try:
            keeper = guard.Guard()
            stack.callback(keeper.close)
            rdzv_handler = self._make_rendezvous(stack)
            stack.callback(rdzv_handler.shutdown)
            starter = Starter(
                self.job.command,
                {**_rank_env(self.job), **self.notices.variables()},
                keeper=keeper,
                on_end=changed.set,
                inherited=[self.notices.writing],
            )
            return Agent(
                self.job,
                rdzv_handler,
                rank_logs=self.rank_logs,
                starter=starter,
                crew=Crew(starter, self.rank_logs, keeper),
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
        self._say(
            f"stopping ({signum.name}): the ranks have {self.job.grace:g} s to save and leave; "
            "once more kills them at once."
        )

    def _say(self, message: str) -> None:
        # The terminal may be what has just gone; that must not keep the ranks from ending.
        with contextlib.suppress(OSError, ValueError):
            self.job.notice(message)

    def _outcome(self, signals: _Signals) -> BaseException | None:
        if self.succeeded:
            return None
        if signals.first is not None:  # whatever else went wrong came of that
            interrupted = signals.first is signal.SIGINT
            return KeyboardInterrupt() if interrupted else SystemExit(128 + signals.first)
        if isinstance(self.error, PacelineError):
            return self.error
        if self.succeeded is None:
            return LaunchError(f"the ranks could not be started: {self.error}")
        return self.agent.error


class _Signals:
    """Notes the signals that ask for an end, where they can be caught: in the main thread.

    SIGUSR1 asks for a checkpoint.
    """

    def __init__(self) -> None:
        self._save_asked = False
        self.first: signal.Signals | None = None
        self.insisted = False
        self._first_at = 0.0
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Ignored (nohup, a background job) stays ignored; None is a handler of C code.
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._earlier[signum] = signal.signal(signum, self._note)
            self._earlier[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note_save)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(signum)
            self._first_at = time.monotonic()
        elif time.monotonic() - self._first_at > _ECHO_SECONDS:
            self.insisted = True

    def _note_save(self, signum: int, frame: FrameType | None) -> None:
        self._save_asked = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def note_end_of_program(self) -> None:
        """In a thread: when the program's main thread is gone, the ranks are to end as well."""
        if self.first is None and not threading.main_thread().is_alive():
            self.first = signal.SIGTERM


def _passed_on(signum: signal.Signals) -> signal.Signals:
    """What ranks get to see: they know Ctrl-C and SIGTERM, a hang-up is the latter to them."""
    return signal.SIGTERM if signum is signal.SIGHUP else signum


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


def _rank_env(job: LocalJob) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1"}
    if FLIGHT_RECORDER not in os.environ:  # here for scripts that make a process group themselves
        env[FLIGHT_RECORDER] = str(COLLECTIVES_REMEMBERED)
    if "OMP_NUM_THREADS" not in os.environ:
        # Each rank would take every core for itself, and all of them would get slower.
        env["OMP_NUM_THREADS"] = str(max(1, _usable_cores() // job.nproc))
    home = str(Path(__file__).parents[2])
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        # Found through a source folder on this process's path: ranks must find it too.
        env["PYTHONPATH"] = os.pathsep.join(
            part for part in (os.environ.get("PYTHONPATH", ""), home) if part
        )
    return {**env, **job.env}


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _write_payload(folder: Path, function: Callable[[], Any]) -> None:
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


def _read_value(folder: Path) -> Any:
    import cloudpickle

    try:
        value = (folder / "value.pkl").read_bytes()
    except FileNotFoundError:
        raise LaunchError(
            "rank 0 left without returning a value (did the function call sys.exit?)."
        ) from None
    return cloudpickle.loads(value)
