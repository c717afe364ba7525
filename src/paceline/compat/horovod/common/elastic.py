"""Training that goes on when ranks come and go: states, and the decorator that runs on them.

Where Horovod repairs the world under its processes, Paceline's launcher starts all ranks again. So
a commit goes to the run's folder as well (``commit_folder``), and ``run_fn`` begins with the newest
one. Reset callbacks are then called, as they are in Horovod.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from paceline.compat.horovod.common.commit_folder import CommitFolder
from paceline.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.common.leave_requests import LEAVE, LeaveRequests

_DEFAULT_LIMIT = 3
"""How often in a row a failure is answered by going back, where nothing else was asked for."""


class HostUpdateResult:
    """What has happened to the hosts; bits that add up."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class LeaveInterrupt(HostsUpdatedInterrupt):
    """The launcher asks this world to leave: it is about to form a new one."""


class State:
    """State that is saved, restored and brought to all ranks.

    ``bcast_object`` sends an object from rank 0 to all others, ``get_rank`` says which rank this
    is.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commit_folder: CommitFolder | None = None
        self.commits = 0
        """How often this process has committed."""

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Have functions called whenever the world has formed anew, before the state is synced."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the world has formed anew."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called from anywhere when hosts come or go; ``check_host_updates`` acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, so that a failure goes back no further; then ``check_host_updates``.

        It is copied and written to the run's folder, which takes time: commit every few batches
        rather than after each, if a batch is short.
        """
        self.save()
        self.keep()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if hosts have come or go."""
        before = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, what = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= what
        before, self._last_updated_timestamp, update = self._agree(before, latest, update)
        if update & LEAVE:
            raise LeaveInterrupt(False)
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def _agree(self, before: float, latest: float, update: int) -> tuple[float, float, int]:
        """One answer on all ranks: rank 0's."""
        agreed: tuple[float, float, int] = self._bcast_object((before, latest, update))
        return agreed

    def save(self) -> None:
        """Save the state to memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Make things anew that depend on the world; called before ``sync``."""

    # Beyond this process.

    def saved(self) -> Any:
        """What ``save`` has saved, for ``take_saved`` of a later process; ``None``: not kept."""
        return None

    def take_saved(self, saved: Any) -> None:
        """Take over what an earlier process has saved; ``restore`` follows."""
        raise NotImplementedError

    def keep(self) -> None:
        """Write what was saved to the run's folder, on one rank of every machine."""
        folder = self._commit_folder
        if folder is None or not folder.writes:
            return
        saved = self.saved()
        if saved is not None:
            folder.write(self._to_bytes(saved))

    def resume(self, call: int) -> bool:
        """Restore the newest commit of an earlier process; ``False`` if there is none."""
        self._commit_folder = CommitFolder.of_run(call)
        content = self._newest_commit()
        if content is None:
            return False
        self.take_saved(self._from_bytes(content))
        self.restore()
        return True

    def _newest_commit(self) -> bytes | None:
        """The content of the newest commit, the same on all ranks: rank 0's."""
        folder, told = self._commit_folder, (0, b"")
        if folder is not None and self._rank() == 0 and (newest := folder.newest()):
            told = newest, folder.read(newest)
        number, content = self._bcast_object(told)
        if folder is not None:
            folder.number = number
        return content or None

    def _to_bytes(self, saved: Any) -> bytes:
        return cloudpickle.dumps(saved)

    def _from_bytes(self, content: bytes) -> Any:
        return cloudpickle.loads(content)


class ObjectState(State):
    """State of plain Python objects, each an attribute by its keyword."""

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Remember the attributes as they are; an object that is changed in place is not copied."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was saved."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes to what rank 0 has saved."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def saved(self) -> Any:
        """The saved attributes."""
        return {"objects": self._saved_state}

    def take_saved(self, saved: Any) -> None:
        """Take over attributes that this state has as well."""
        known = {k: v for k, v in saved["objects"].items() if k in self._saved_state}
        self._saved_state = {**self._saved_state, **known}

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class FailureRow:
    """How often in a row training came no further, with all ranks alive.

    A failure belongs to the row if nothing was committed since the one before; or if it is the
    same one, after as many commits: a script that commits before it fails gets no further either.
    """

    def __init__(self, state: State, limit: int) -> None:
        self._state, self._limit = state, limit
        self._commits = state.commits
        self._last: tuple[str, int] | None = None
        self._length = 0

    def add(self, error: HorovodInternalError) -> None:
        """Count a failure; raises when the row is longer than the limit."""
        commits, self._commits = self._state.commits - self._commits, self._state.commits
        this = (str(error), commits)
        goes_on = self._last is not None and (commits == 0 or this == self._last)
        self._length = self._length + 1 if goes_on else 1
        self._last = this
        if self._length > self._limit:
            raise HorovodInternalError(
                f"{error}. Going back to the last commit {self._limit} times in a row did not "
                "help, so training ends here. If such a failure passes by itself, allow more: "
                "--max-restarts N (horovodrun's --reset-limit)."
            ) from error


def _failure_limit() -> int:
    """``--max-restarts`` where it allows any, which is horovodrun's ``--reset-limit``."""
    given = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else _DEFAULT_LIMIT


_calls = itertools.count()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """``func``, run on a state until it returns; ``reset`` makes the world anew.

    A failure of an operation with all ranks alive goes back to the last commit, but not for ever:
    see ``FailureRow``.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **options: Any) -> Any:
        with LeaveRequests(state.on_hosts_updated) as requests:
            if state.resume(next(_calls)):
                state.on_reset()
            failures = FailureRow(state, _failure_limit())
            skip_sync = False
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **options)
                except HorovodInternalError as error:
                    if requests.came:  # the launcher has begun to end what is left of the world
                        _say(f"a collective operation failed ({error}); this rank leaves")
                        requests.leave()
                    requests.stop_listening()  # until there is a world again that could agree
                    failures.add(error)
                    _say(f"a collective operation failed ({error}); back to the last commit")
                    state.restore()
                    skip_sync = False
                except LeaveInterrupt:
                    state.save()  # all ranks are here: what is not committed is kept as well
                    state.keep()
                    requests.leave()
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                requests.listen()
                state.on_reset()

    return wrapper


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
