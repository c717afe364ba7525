"""What each worker of Ray Train runs: one rank of a config's run, or of a script's."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from paceline.config import load
from paceline.errors import LaunchError
from paceline.events import Note, RanksStarted, append
from paceline.launch.engines.ray_orders import RankOrders
from paceline.launch.environment import RUN_DIR
from paceline.launch.exit_codes import INTERRUPTED, SAVED_AND_LEFT
from paceline.launch.logs import attempt_folder, next_attempt
from paceline.launch.run_folder import RunFolder, has_mark
from paceline.launch.worker import prepare_for
from paceline.trainer.callbacks import Callback
from paceline.trainer.ray_report import RayReport
from paceline.world.world import leave

_ASK_SECONDS = 0.5


def run(told: dict[str, Any]) -> str:
    """The training function: ``told`` is a ``RankOrders``; says how the rank's work ended."""
    from ray.train.collective import broadcast_from_rank_zero

    orders = RankOrders(**told)
    _quiet_ray_train()
    _go_to(orders)
    _check_sees(orders)
    run = RunFolder(Path(orders.run))
    rank = int(os.environ["RANK"])
    attempt, goes_on = next_attempt(run.logs), orders.resume or run.events.exists()
    # Rank 0 decides for all: it is about to write files that others would see.
    attempt, goes_on = broadcast_from_rank_zero((attempt, goes_on) if rank == 0 else None)
    ended = "finished"
    with _logged(attempt_folder(run.logs, attempt) / f"rank{rank}.log"):
        try:
            if orders.script is not None:
                _run_script(orders)
            else:
                _train(orders, run, attempt, resume=goes_on)
        except KeyboardInterrupt:
            ended = "interrupted"
        except SystemExit as leaving:
            if leaving.code in (*SAVED_AND_LEFT, INTERRUPTED):
                ended = "interrupted"
            elif leaving.code not in (None, 0):
                leave(failed=True)
                raise LaunchError(f"rank {rank} exited with {leaving.code!r}.") from None
        except BaseException:
            leave(failed=True)
            raise
        leave()
    return ended


def _quiet_ray_train() -> None:
    """Keep Ray Train from telling of every report; some of its loggers are named by their file."""
    for name in list(logging.root.manager.loggerDict):
        if name == "ray.train" or "/ray/train/" in name:
            logging.getLogger(name).setLevel(logging.WARNING)


def _go_to(orders: RankOrders) -> None:
    """Be where the command was typed, or where Ray has put the code."""
    folder = os.environ.get(RankOrders.SHIPPED, "") if orders.shipped else orders.folder
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"{folder!r} cannot be entered on {os.uname().nodename}: {error.strerror}. All nodes "
            "must see the folder in which the command is typed; or ship it with "
            "launch.ray.working_dir."
        ) from None
    sys.path.insert(0, folder)


def _check_sees(orders: RankOrders) -> None:
    """All nodes share the run's folder: without that there is nothing to go on from."""
    if orders.identity is not None and not has_mark(orders.run, orders.identity):
        raise LaunchError(
            f"{orders.run!r} on {os.uname().nodename} is not the run folder that the command made. "
            "All nodes of the cluster, and the machine that starts the run, must share it: name "
            "one on a shared disk with --run-dir."
        )


def _train(orders: RankOrders, run: RunFolder, attempt: int, *, resume: bool) -> None:
    from paceline.trainer.run import from_config

    settings = None if orders.settings is None else Path(orders.settings)
    config = load(settings or run.config)
    if orders.shipped:
        config = config.model_copy(update={"code": [os.getcwd()]})
    if os.environ["RANK"] == "0":
        _tell_started(run, attempt)
    callbacks: list[Callback] = [RayReport(copy=orders.copies)]
    if orders.control is not None:
        callbacks.append(_Control(orders.control))
    from_config(config, run.path, resume=resume, settings=settings, callbacks=callbacks)


def _tell_started(run: RunFolder, attempt: int) -> None:
    event = RanksStarted(
        nproc=int(os.environ["LOCAL_WORLD_SIZE"]),
        attempt=attempt,
        world_size=int(os.environ["WORLD_SIZE"]),
        nodes=json.loads(os.environ[RankOrders.HOSTS]),
    )
    append(run.path, event)
    if attempt:
        append(run.path, Note(message=f"Ray has started the ranks again (start {attempt + 1})"))


def _run_script(orders: RankOrders) -> None:
    script = cast(str, orders.script)
    os.environ[RUN_DIR] = orders.run
    if orders.backend is not None:
        prepare_for(orders.backend)
    sys.argv = [script, *orders.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(os.path.abspath(script), run_name="__main__")


class _Control(Callback):
    """Asks whether the run is to save and leave: Ray sends no signals to its workers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._over = threading.Event()

    def on_fit_start(self, trainer: Any) -> None:
        """Begin to ask on rank 0, in a thread that ends with the run."""
        if not trainer.engine.world.is_main:
            return
        threading.Thread(target=self._ask, args=(trainer,), daemon=True).start()

    def on_fit_end(self, trainer: Any, history: Any) -> None:
        """Stop asking."""
        self._over.set()

    def _ask(self, trainer: Any) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone: so is the run, in a moment
            control = ray.get_actor(self._name, namespace=RankOrders.NAMESPACE)
            while not self._over.wait(_ASK_SECONDS):
                if ray.get(control.is_to_leave.remote()):
                    trainer.interrupt()
                    return


class _Tee(io.TextIOBase):
    """Writes to Ray's own log of this worker, and to the run's."""

    def __init__(self, first: IO[str], second: IO[str]) -> None:
        self._both = (first, second)

    def write(self, text: str) -> int:
        """To both; a disk that is full costs output, not the run."""
        for file in self._both:
            with contextlib.suppress(OSError, ValueError):
                file.write(text)
                file.flush()
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """A log is no terminal."""
        return False

    def fileno(self) -> int:
        """That of Ray's log, for programs that this one starts."""
        return self._both[0].fileno()


@contextlib.contextmanager
def _logged(log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        out, err = sys.stdout, sys.stderr
        sys.stdout = cast(Any, _Tee(out, file))
        sys.stderr = cast(Any, _Tee(err, file))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
