"""The threads of a rank: what is submitted goes to the coordinator, what it answers is done.

Rank 0 has the coordinator: a thread that owns the ``Negotiator`` and hears of every rank. Each rank
has one that receives the answers, and one that runs them, so that a long reduction keeps neither
the main thread nor the negotiation waiting. The first rank that ends, on purpose or not, ends it
for all: what is outstanding raises ``HorovodInternalError`` everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from paceline.compat.horovod.common.exceptions import DuplicateNameError, HorovodInternalError
from paceline.compat.horovod.runtime.executor import Executor, Submission
from paceline.compat.horovod.runtime.messages import (
    GLOBAL_SET,
    Request,
    Response,
    decode_requests,
    decode_responses,
    encode,
)
from paceline.compat.horovod.runtime.negotiation import Addressed, Negotiator
from paceline.compat.horovod.runtime.settings import HorovodSettings
from paceline.compat.horovod.runtime.wire import Wire

logger = logging.getLogger("paceline.compat.horovod")

Observer = Callable[[str, str, str], None]
"""Called with the name of a tensor, its kind of operation, and ``submitted``, ``started`` or
``finished``; from any thread."""

_JOIN_SECONDS = 20.0
_SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution"
)


class Background:
    """The threads of this rank. ``wire`` is ``None`` in a world of one."""

    def __init__(
        self,
        rank: int,
        size: int,
        wire: Wire | None,
        executor: Executor,
        settings: HorovodSettings,
        on_failure: Callable[[], None],
    ) -> None:
        self.rank, self.size = rank, size
        self._wire, self._executor, self._settings = wire, executor, settings
        self._on_failure = on_failure
        self.observer: Observer | None = None
        self._lock = threading.Lock()
        self._outstanding: dict[tuple[int, str], Submission] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._ended = ""
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
        """Of the coordinator."""
        self._responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; they end with ``shutdown``, here or on another rank."""
        self._begin("execute", self._execute)
        if self.rank == 0:
            for peer in range(1, self.size):
                self._begin(f"hear {peer}", self._hear, peer)
            self._begin("coordinate", self._coordinate)
        else:
            self._begin("send", self._send)
            self._begin("receive", self._receive)

    def _begin(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(
            target=target, args=args, name=f"paceline-horovod-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def next_name(self, kind: str, process_set: int) -> str:
        """A name for a tensor that was given none: a running number of its operation."""
        with self._lock:
            count = self._counts[process_set, kind] = self._counts.get((process_set, kind), 0) + 1
        return f"{kind}.noname.{count}"

    def submit(self, submission: Submission) -> None:
        """Take part in a collective; ``submission.done`` is set when it is over."""
        request = submission.request
        key = (request.process_set, request.name)
        with self._lock:
            if self._ended:
                raise HorovodInternalError(f"{request.name}: {self._ended}")
            if key in self._outstanding:
                raise DuplicateNameError(
                    f"{request.name}: requested to {request.kind} a tensor with the same name as "
                    "another tensor that is currently being processed. If you want to request "
                    "another tensor, use a different tensor name, or synchronize() the first."
                )
            self._outstanding[key] = submission
        self._observe(request.name, request.kind, "submitted")
        self._post(request)

    def report_problem(self, request: Request) -> None:
        """Have the ranks that wait for this request know that it is not coming."""
        with self._lock:
            if self._ended or (request.process_set, request.name) in self._outstanding:
                return
        self._post(request)

    def shutdown(self) -> None:
        """End the threads, here and on all ranks, after what is under way."""
        with self._lock:
            ended = bool(self._ended)
        if not ended:
            self._post(Request(self.rank, "shutdown", "shutdown"))
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wire = None  # its connections close with the last reference

    def _post(self, request: Request) -> None:
        if self.rank == 0:
            self._inbox.put([request])
        else:
            self._outbox.put(request)

    def _observe(self, name: str, kind: str, what: str) -> None:
        if self.observer is not None:
            self.observer(name, kind, what)

    # ---- ranks other than 0 ----

    def _send(self) -> None:
        """Hand what was submitted to rank 0, all there is at a time."""
        assert self._wire is not None
        while True:
            request = self._outbox.get()
            batch: list[Request] = []
            while request is not None:
                batch.append(request)
                try:
                    request = self._outbox.get_nowait()
                except queue.Empty:
                    break
            try:
                if batch:
                    self._wire.send(0, encode(batch))
                if request is None:
                    self._wire.send(0, encode([Request(self.rank, "bye", "bye")]))
                    return
            except RuntimeError:
                return  # rank 0 is gone: the receiving thread says so

    def _receive(self) -> None:
        """Take what rank 0 answers, until one answer is the last."""
        assert self._wire is not None
        while True:
            try:
                responses = decode_responses(self._wire.receive(0))
            except RuntimeError as error:
                responses = [_lost(0, error)]
            for response in responses:
                self._responses.put(response)
            if responses[-1].kind == "shutdown":
                self._outbox.put(None)
                return

    # ---- rank 0 ----

    def _hear(self, peer: int) -> None:
        """Take what ``peer`` submits, for the coordinator."""
        assert self._wire is not None
        while True:
            try:
                requests = decode_requests(self._wire.receive(peer))
            except RuntimeError as error:
                self._inbox.put([Request(peer, "lost", "lost", problem=_lost(peer, error).error)])
                return
            if requests[-1].kind == "bye":
                return
            self._inbox.put(requests)

    def _coordinate(self) -> None:
        """Match the requests of all ranks, until one of them ends it."""
        negotiator = Negotiator(self.size, self._settings.fusion_bytes, time.monotonic)
        check_every = max(0.05, self._settings.stall_warning_seconds / 4)
        warned: set[str] = set()
        while True:
            answers: list[Addressed] = []
            requests = self._gather_requests(negotiator, check_every)
            for request in requests:
                if request.kind in ("shutdown", "failed", "lost"):
                    self._answer([*answers, *negotiator.take()], dead=_dead(request))
                    everyone = tuple(range(self.size))
                    last = Addressed(_ending(request), everyone)
                    self._answer([last], dead=_dead(request))
                    return
                answers += negotiator.receive(request)
            answers += negotiator.take()
            answers += negotiator.take_deadlock()
            stalled = self._check_stalls(negotiator, warned)
            if stalled:
                self._inbox.put([Request(0, "failed", "stalled", problem=stalled)])
            self._answer(answers)

    def _gather_requests(self, negotiator: Negotiator, timeout: float) -> list[Request]:
        """What has arrived; for a moment longer where there may be more to fuse."""
        try:
            requests = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return []
        with contextlib.suppress(queue.Empty):
            while True:
                wait = self._settings.cycle_seconds if negotiator.has_unfinished else 0.0
                requests += self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        return requests

    def _answer(self, answers: Sequence[Addressed], dead: int = -1) -> None:
        by_rank: dict[int, list[Response]] = {}
        for response, ranks in answers:
            for rank in ranks:
                by_rank.setdefault(rank, []).append(response)
        for response in by_rank.pop(0, []):
            self._responses.put(response)
        for rank, responses in by_rank.items():
            if rank == dead:
                continue
            assert self._wire is not None
            try:
                self._wire.send(rank, encode(responses))
            except RuntimeError as error:
                problem = _lost(rank, error).error
                self._inbox.put([Request(rank, "lost", "lost", problem=problem)])

    def _check_stalls(self, negotiator: Negotiator, warned: set[str]) -> str:
        """Warn of names that wait; returns why to give up, where that was asked for."""
        settings = self._settings
        if not settings.stall_check:
            return ""
        stalled = negotiator.stalled(settings.stall_warning_seconds)
        warned.intersection_update([stall.name for stall in stalled])  # to be warned of again
        new = [stall for stall in stalled if stall.name not in warned]
        if new:
            warned.update(stall.name for stall in new)
            lines = [
                f"  {stall.name}: missing ranks {list(stall.missing)}"
                + "".join(
                    f"; rank {rank} waits in {names[0]} instead"
                    for rank in stall.missing
                    if (names := negotiator.outstanding(rank))
                )
                for stall in new
            ]
            logger.warning(
                "One or more tensors were submitted to be reduced, gathered or broadcasted by "
                "subset of ranks and are waiting for remainder of ranks for more than %g seconds. "
                "This may indicate that different ranks are trying to submit different tensors or "
                "that only subset of ranks is submitting tensors, which will cause deadlock.\n%s",
                settings.stall_warning_seconds,
                "\n".join(lines),
            )
        limit = settings.stall_shutdown_seconds
        if limit > 0:
            for stall in stalled:
                if stall.seconds > limit:
                    return (
                        f"{stall.name} waits for ranks {list(stall.missing)} for longer than "
                        f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit:g}"
                    )
        return ""

    # ---- every rank ----

    def _execute(self) -> None:
        """Do what is answered, in its order."""
        while True:
            response = self._responses.get()
            if response.kind == "shutdown":
                self._end(response.error, failed=bool(response.value))
                return
            submissions = self._claim(response)
            if response.restarts_numbers:
                with self._lock:
                    self._counts.clear()
            if response.kind == "error":
                _finish(submissions, response.error)
                continue
            for submission in submissions:
                self._observe(submission.request.name, response.kind, "started")
            try:
                self._executor.run(response, submissions)
            except Exception as error:
                text = f"{', '.join(response.names[:3])}: {type(error).__name__}: {error}"
                problem = f"{response.kind} failed on rank {self.rank}: {text}"
                _finish(submissions, problem)
                # Members that are in the same collective get an error as well, instead of waiting.
                self._on_failure()
                self._post(Request(self.rank, "failed", "failed", problem=problem))
                continue
            for submission in submissions:
                self._observe(submission.request.name, response.kind, "finished")
            _finish(submissions, "")

    def _claim(self, response: Response) -> list[Submission]:
        """This rank's part of a response; none where it has joined."""
        with self._lock:
            found = [
                self._outstanding.pop((response.process_set, name), None) for name in response.names
            ]
        return [submission for submission in found if submission is not None]

    def _end(self, reason: str, *, failed: bool) -> None:
        if failed:
            self._on_failure()
        with self._lock:
            self._ended = reason
            left = list(self._outstanding.values())
            self._outstanding.clear()
        for submission in left:
            _finish([submission], f"{submission.request.name}: {reason}")


def _finish(submissions: Sequence[Submission], error: str) -> None:
    for submission in submissions:
        submission.error = error
        submission.done.set()


def _lost(peer: int, error: Exception) -> Response:
    text = str(error).partition("\n")[0]
    return Response(
        "shutdown",
        [],
        GLOBAL_SET,
        value=1,
        error=f"rank {peer} has exited or is unreachable: {text}",
    )


def _dead(request: Request) -> int:
    return request.rank if request.kind == "lost" else -1


def _ending(request: Request) -> Response:
    if request.kind == "shutdown":
        return Response("shutdown", [], error=f"{_SHUT_DOWN} (rank {request.rank} did).", value=0)
    return Response("shutdown", [], error=f"{_SHUT_DOWN}: {request.problem}.", value=1)
