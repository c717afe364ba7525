"""The elastic agent over the ranks of this node: starts them, and starts them again when they fail.

Torch's agent does the rendezvous with the other launchers and assigns the ranks. We add, in the
hooks it has for that: the processes themselves (``paceline.launch.worker_group``), what is done
when a world ends before its time, as ``paceline.launch.restart_policy`` decides and all its
launchers agree (``paceline.launch.outcome_store``), and a stop that gives ranks time to save.

Imports torch at the top, so it is itself imported only when ranks are about to start.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from paceline.errors import LaunchError
from paceline.events import Event, RanksStarted
from paceline.launch import exit_codes, failure
from paceline.launch.environment import RankAssignment, ranks_per_node
from paceline.launch.hang_watcher import DetectedHang, HangWatcher, StartedRanks
from paceline.launch.job import LocalJob
from paceline.launch.logs import RankLogs, node_folder
from paceline.launch.messages import BadMessage
from paceline.launch.outcome import (
    RUN_IS_DONE,
    WorldOutcome,
    idle_ranks,
    interrupted,
    nodes_waiting,
    told_to_leave,
)
from paceline.launch.outcome_store import NodeHistory, OutcomeStore
from paceline.launch.processes import Starter
from paceline.launch.rendezvous.handler import LauncherRendezvous, LocalRendezvous, WaitingStopped
from paceline.launch.restart_policy import Decision, Ending, decide
from paceline.launch.run_progress import RunProgress
from paceline.launch.worker_group import LocalWorkerGroup

# Peers of a failed rank cannot save together any more: this long to leave, and no longer.
_FAILED_GRACE_SECONDS = 5.0
_MONITOR_SECONDS = 0.1
_EXIT_BARRIER_SECONDS = 10.0
# Ranks saved and left: another launcher may be about to publish why.
_WHY_SECONDS = 1.0
_RETRY_SECONDS = 1.0
# Ranks that do not report their steps are assumed to train after this long.
_MOVING_SECONDS = 10.0


class _Over(Exception):
    """The run is over, because of ``Agent.error``."""


class Agent(SimpleElasticAgent):
    """Runs the ranks of one launch; ``run()`` in a thread of its own, the rest from any other."""

    def __init__(
        self,
        job: LocalJob,
        rdzv_handler: LauncherRendezvous,
        *,
        rank_logs: RankLogs,
        starter: Starter,
        workers: LocalWorkerGroup,
        changed: threading.Event,
        on_start: Callable[[bool], None],
        say: Callable[[str], None],
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.nproc,
            entrypoint=sys.executable,
            rdzv_handler=rdzv_handler,
            max_restarts=0,  # in torch's sense: we start ranks again without its help
            monitor_interval=0.001,  # _monitor_workers does the waiting
        )
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_SECONDS)
        self.error: LaunchError | None = None
        """Why the run is over, if not because it is done."""
        self._job = job
        self._rdzv_handler = rdzv_handler
        self._rank_logs = rank_logs
        self._starter = starter
        self._workers = workers
        self._changed = changed
        self._on_start = on_start
        self._say = say
        self._hang_watcher: HangWatcher | None = job.hang_watcher() if job.hang_watcher else None
        self._hang_watched = False
        self._run_progress = RunProgress(job.events_dir)
        self._outcomes = OutcomeStore(None, 0, 1)
        self._failures: list[failure.RankExit] = []
        self._finished: list[int] = []
        self._world_size = job.nproc
        self._history: list[Ending] = []
        self._starts = 0
        self._started_at = time.monotonic()
        self._node = 0
        self._members: list[NodeHistory] = []
        self._node_sizes: list[int] = []
        """How many ranks each node has."""
        self._stop_signal: signal.Signals | None = None

    # Called by other threads.

    def request_stop(self, signum: signal.Signals) -> None:
        """Have the ranks sent ``signum`` and, after the grace period, killed."""
        self._stop_signal = signum
        self._changed.set()
        self._rdzv_handler.stop_waiting()

    def ask_to_save(self) -> None:
        """Have the ranks save a checkpoint."""
        self._workers.send(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill every rank and what it started, now."""
        self._workers.kill()

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to the end of the run; failed, if it is over because of an outcome."""
        try:
            result = super().run(role)
            if (
                result is None
            ):  # torch's "graceful exit": the rendezvous is complete without this node
                raise RuntimeError("this node was not needed")
            self._rdzv_handler.close_for_all(RUN_IS_DONE)
            return result
        except RendezvousClosedError as closed:
            self.error = LaunchError(f"the run is over: {closed}.")
        except _Over:
            pass
        return RunResult(WorkerState.FAILED)

    # The hooks of the elastic agent.

    def _rendezvous(self, worker_group: Any) -> None:
        """Form a world with the other launchers, repeated until all of them are in it."""
        while True:
            self._stop_if_asked()
            try:
                super()._rendezvous(worker_group)
                self._node = worker_group.group_rank
                nodes = worker_group.group_world_size
                self._outcomes = OutcomeStore(worker_group.store, self._node, nodes)
                me = NodeHistory(self._job.nproc, self._starts, self._history)
                self._members = self._outcomes.exchange(me)
                return
            except WaitingStopped:
                self._stop_if_asked()
                raise
            except (BadMessage, OSError, RuntimeError) as error:
                if isinstance(self._rdzv_handler, LocalRendezvous):
                    raise
                # One of them was gone before the world had formed.
                self._say(f"a world could not form ({error}); the nodes meet again")
                self._pause(_RETRY_SECONDS)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_if_asked()
        assignment, idle = self._assign_ranks(worker_group)
        nodes = self._rdzv_handler.nodes
        several = len(nodes) > 1 and self._job.node_logs
        folder = node_folder(self._node, self._job.host) if several else ""
        self._rank_logs.begin(assignment.ranks, node=folder)
        self._run_progress.mark()
        self._started_at = time.monotonic()
        self._workers.start(assignment)
        if self._node == 0:
            self._post(
                RanksStarted(
                    nproc=assignment.local_size,
                    attempt=self._rank_logs.attempt,
                    world_size=assignment.size,
                    nodes=nodes,
                    idle=idle,
                )
            )
        if idle:
            self._say(idle_ranks(idle, assignment.size))
        if self._hang_watcher:
            self._hang_watched = True
            self._hang_watcher.started(
                StartedRanks(
                    ranks=self._workers.pids,
                    world_size=assignment.size,
                    node=self._node,
                    nodes=nodes,
                    address=assignment.address,
                    port=assignment.port,
                    round=self._starts - 1,
                    scratch=self._rank_logs.scratch,
                )
            )
        self._on_start(0 in assignment.ranks)
        return {rank - assignment.first: pid for rank, pid in self._workers.pids.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Watch the ranks for a moment; if their world has ended, do what follows."""
        self._wait(_MONITOR_SECONDS)
        outcome = self._look()
        if outcome is not None:
            self._follow(outcome)
            self._pause(outcome.decision.delay)
            self._initialize_workers(worker_group)
        elif self._outcomes.all_done():
            # Idle ranks have "returned" as well, for torch's records.
            everyone = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=everyone)
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Make room for a new world: torch does this alone when nodes wait to join."""
        waiting = self._rdzv_handler.num_nodes_waiting()
        ending = self._ending("node_joined", nodes_waiting(waiting))
        outcome = self._agree_on(ending)
        self._workers.send(signal.SIGTERM)
        self._workers.wait(self._job.grace)
        self._follow(outcome)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        self._workers.send(death_sig)
        if self._stop_signal is not None:
            self._announce_stop(self._stop_signal)
        self._workers.wait(self._job.grace)
        self._end_world()
        self._starter.close()
        if self._stop_signal is signal.SIGINT:
            self._rdzv_handler.close_for_all(interrupted(self._job.host))
        elif self._stop_signal is not None:
            self._rdzv_handler.leave("preempted")

    # The ranks of this node in a new world.

    def _assign_ranks(self, worker_group: Any) -> tuple[RankAssignment, int]:
        """The ranks of this node in the new world, and how many of the whole world are idle."""
        first, members = worker_group.workers[0], self._members
        # A launcher that has just joined takes over the history of the others.
        self._history = max((m.history for m in members), key=len)
        restarts = max(member.starts for member in members)
        self._starts = restarts + 1
        total = first.world_size
        used = total if self._job.usable_ranks is None else self._job.usable_ranks(total)
        self._world_size = used
        node_sizes = ranks_per_node([member.nproc for member in members], used)
        with_ranks = [node for node, part in enumerate(node_sizes) if part > 0]
        self._outcomes.watch(with_ranks)
        self._node_sizes = node_sizes
        assignment = RankAssignment(
            size=used,
            first=first.global_rank,
            local_size=node_sizes[self._node],
            node=self._node,
            nodes=len(with_ranks),
            address=worker_group.master_addr,
            port=worker_group.master_port,
            restart_count=restarts,
            max_restarts=self._job.limits.max_restarts,
            run_id=self._rdzv_handler.get_run_id(),
        )
        return assignment, total - used

    # Watching the ranks.

    def _look(self) -> WorldOutcome | None:
        """The outcome of the world, if it has ended; its ranks here are then ended as well."""
        if (found := self._outcomes.outcome()) is not None:
            self._end_ranks_after(found)
            return found
        if any(code != 0 for code in self._workers.exit_codes.values()):
            return self._after_exits()
        if self._workers.pids and self._workers.is_done:
            self._outcomes.mark_done()
        if self._outcomes.all_done():
            return None
        if (why := self._rdzv_handler.lost()) is not None:
            if why == RUN_IS_DONE and self._workers.is_done:
                # Whoever says so has seen that all are done; we have not read that yet.
                self._outcomes.mark_all_done()
                return None
            return self._after_loss(why)
        if self._hang_watcher and (stuck := self._hang_watcher.look()) is not None:
            return self._after_hang(stuck)
        self._workers.kill_those_that_raised(self._job.grace)
        if self._job.standby and (
            self._job.limits.max_restarts or len(self._rdzv_handler.nodes) > 1
        ):
            self._starter.tend_standbys(len(self._workers.pids), moving=self._seem_to_move)
        return None

    def _seem_to_move(self) -> bool:
        """Whether the ranks train; assumed after a while for those that do not report steps."""
        moved = self._run_progress.moved()
        return time.monotonic() - self._started_at > _MOVING_SECONDS if moved is None else moved

    def _after_exits(self) -> WorldOutcome:
        if all(
            code in (0, *exit_codes.SAVED_AND_LEFT) for code in self._workers.exit_codes.values()
        ):
            self._workers.wait(self._job.grace)
            self._pause(_MONITOR_SECONDS * 3)  # the same signal may be on its way to this process
        self._workers.end_after_failure(_FAILED_GRACE_SECONDS)
        failures = self._workers.failures()
        first = failure.culprit(failures) if failures else None
        if len(self._rdzv_handler.nodes) > 1 and (first is None or first.lost_peer):
            # Not the fault of this node's ranks: wait for the launcher that knows why.
            seconds = _WHY_SECONDS if first is None else self._rdzv_handler.patience
            if (outcome := self._wait_for_outcome(seconds)) is not None:
                return outcome
        self._failures, self._finished = failures, self._workers.finished()
        if first is None:
            return self._agree_on(self._ending("preemption", "the ranks were told to leave"))
        step, moved, seconds = self._progress()
        ending = failure.ending_of(first, step=step, moved=moved, seconds=seconds)
        return self._agree_on(ending, rank=first.rank, exit_code=first.exit_code)

    def _wait_for_outcome(self, seconds: float) -> WorldOutcome | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (found := self._outcomes.outcome()) is not None:
                return found
            if (why := self._rdzv_handler.lost()) is not None:
                return self._after_loss(why)
            self._wait(_MONITOR_SECONDS)
        return None

    def _after_loss(self, why: str) -> WorldOutcome:
        if self._rdzv_handler.is_closed():  # somebody ended the run: the ranks may save
            self._workers.send(signal.SIGTERM)
            self._workers.wait(self._job.grace)
            over = Decision(False, 0.0, why)
            return self._agree_on(self._ending("preemption", why), over)
        self._workers.kill()
        return self._agree_on(self._ending("node_lost", why))

    def _after_hang(self, stuck: DetectedHang) -> WorldOutcome:
        self._workers.kill()  # a rank that hangs cannot save
        ending = self._ending("hang", stuck.summary, step=stuck.step)
        decision = None
        if stuck.action == "stop":
            decision = Decision(False, 0.0, "hangs.action is stop")
        return self._agree_on(ending, decision, rank=next(iter(stuck.ranks), None), exit_code=1)

    def _end_ranks_after(self, outcome: WorldOutcome) -> None:
        if not outcome.orderly:
            self._workers.end_after_failure(_FAILED_GRACE_SECONDS)
            return
        # Ranks agree among themselves to save and leave; those of a plain script do not.
        if not self._workers.wait(self._job.grace / 2):
            self._workers.send(signal.SIGTERM)
            self._workers.wait(self._job.grace / 2)

    # Outcomes: agreed on, and acted on.

    def _ending(self, kind: Any, error: str, *, step: int | None = None) -> Ending:
        last, moved, seconds = self._progress()
        step = last if step is None else step
        return Ending(kind, error, step=step, moved=moved, seconds=seconds)

    def _progress(self) -> tuple[int | None, bool | None, float]:
        seconds = time.monotonic() - self._started_at
        return self._run_progress.last(), self._run_progress.moved(), seconds

    def _agree_on(
        self,
        ending: Ending,
        decision: Decision | None = None,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
    ) -> WorldOutcome:
        """The outcome that all launchers agree on, which may be another launcher's."""
        decision = decision or decide([*self._history, ending], self._job.limits)
        log = str(self._rank_logs.log(rank)) if rank in self._workers.pids else ""
        own_error = self._explain(decision) if self._failures else None
        report = "" if own_error is None else str(own_error)
        mine = WorldOutcome(ending, decision, self._host_of(rank), rank, exit_code, log, report)
        counts = self._outcomes.agree(mine)
        if counts is mine:
            for event in mine.events():
                self._post(event)
        if not counts.decision.restart:
            self.error = own_error if counts is mine and own_error else counts.to_error()
        return counts

    def _host_of(self, rank: int | None) -> str:
        """The machine that ``rank`` is on; this one for ``None``."""
        if rank is not None:
            for host, part in zip(self._rdzv_handler.nodes, self._node_sizes, strict=False):
                if rank < part:
                    return host
                rank -= part
        return self._job.host

    def _explain(self, decision: Decision) -> LaunchError:
        several = len(self._rdzv_handler.nodes) > 1
        return failure.explain(
            self._failures,
            self._world_size,
            finished=self._finished,
            shown=self._job.output is not None,
            host=self._job.host if several else "",
            no_restart=decision.reason if self._job.limits.max_restarts else "",
            would_recur=decision.would_recur,
        )

    def _follow(self, outcome: WorldOutcome) -> None:
        """End what is left of the world; raises ``_Over`` unless the run goes on."""
        self._end_world()
        self._failures, self._finished = [], []
        self._history = [*self._history, outcome.ending]
        if not outcome.decision.restart:
            self.error = self.error or outcome.to_error()
            self._rdzv_handler.close_for_all(outcome.decision.reason)
            raise _Over
        self._report_restart(outcome)

    def _report_restart(self, outcome: WorldOutcome) -> None:
        # Where the run's events are shown, this is among them.
        if self._job.events_dir is None or self._node != 0:
            self._say(outcome.restart_notice())

    def _announce_stop(self, signum: signal.Signals) -> None:
        """Let the other launchers know why the ranks of this one leave."""
        if len(self._rdzv_handler.nodes) < 2 or not self._workers.pids:
            return
        if signum is signal.SIGINT:
            why = interrupted(self._job.host)
            self._agree_on(self._ending("preemption", why), Decision(False, 0.0, why))
        else:
            self._agree_on(self._ending("preemption", told_to_leave(self._job.host)))

    def _end_world(self) -> None:
        self._outcomes.close()
        self._workers.end()
        self._starter.stop_loading()
        if self._hang_watcher and self._hang_watched:
            self._hang_watched = False
            self._hang_watcher.ended()

    def _post(self, event: Event) -> None:
        self._rdzv_handler.post(event)

    def _stop_if_asked(self) -> None:
        if self._stop_signal is not None:
            raise SignalException("stop requested", self._stop_signal)

    def _wait(self, seconds: float) -> None:
        """Wait until a rank ends or a stop is asked for, no longer than ``seconds``."""
        self._changed.wait(seconds)
        self._changed.clear()
        self._stop_if_asked()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)
