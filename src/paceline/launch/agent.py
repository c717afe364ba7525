"""torch's elastic agent over the ranks of this node.

Torch's part is to meet the other launchers and to give ranks their numbers. Ours, in the hooks it
has for that: the processes themselves (:class:`~paceline.launch.crew.Crew`), what is done when a
world ends before its time, as :mod:`paceline.launch.policy` decides and all its launchers agree
(:mod:`paceline.launch.verdicts`), and a stop that gives ranks time to save.

Imports torch at the top, so it is itself imported only when ranks are about to start.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from paceline.launch import codes, failure, telling
from paceline.launch.crew import Crew
from paceline.launch.logs import RankLogs, node_folder
from paceline.launch.messages import BadMessage
from paceline.launch.overseer import Overseer, Started, Stuck
from paceline.launch.policy import Decision, Ending, decide
from paceline.launch.processes import Starter
from paceline.launch.rank_environment import Place, used_parts
from paceline.launch.rendezvous.handler import LauncherRendezvous, LocalRendezvous, WaitingStopped
from paceline.launch.steps import StepsDone
from paceline.launch.verdicts import NodeHistory, Verdict, Verdicts

if TYPE_CHECKING:
    from paceline.launch.local import LocalJob

# Peers of a failed rank cannot save together any more: this long to leave, and no longer.
_FAILED_GRACE_SECONDS = 5.0
_MONITOR_SECONDS = 0.1
_EXIT_BARRIER_SECONDS = 10.0
# Ranks saved and left: the launcher of another node may be about to say why.
_WHY_SECONDS = 1.0
_MEET_AGAIN_SECONDS = 1.0
# Ranks that do not tell their steps are believed to train after this long.
_MOVING_SECONDS = 10.0


class _Over(Exception):
    """The run is over, because of ``Agent.error``."""


class Agent(SimpleElasticAgent):
    """Runs the ranks of one launch; ``run()`` belongs in a thread, the rest to any other."""

    def __init__(
        self,
        job: LocalJob,
        rdzv_handler: LauncherRendezvous,
        *,
        rank_logs: RankLogs,
        starter: Starter,
        crew: Crew,
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
        self._crew = crew
        self._changed = changed
        self._on_start = on_start
        self._say = say
        self._overseer: Overseer | None = job.overseer() if job.overseer else None
        self._overseen = False
        self._steps = StepsDone(job.events_dir)
        self._verdicts = Verdicts(None, 0, 1)
        self._failures: list[failure.RankExit] = []
        self._finished: list[int] = []
        self._world_size = job.nproc
        self._history: list[Ending] = []
        self._starts = 0
        self._started_at = time.monotonic()
        self._node = 0
        self._members: list[NodeHistory] = []
        self._parts: list[int] = []
        """How many ranks each node has."""
        self._stop_signal: signal.Signals | None = None

    # What other threads may ask.

    def request_stop(self, signum: signal.Signals) -> None:
        """Have the ranks sent ``signum`` and, after the grace period, killed."""
        self._stop_signal = signum
        self._changed.set()
        self._rdzv_handler.stop_waiting()

    def ask_to_save(self) -> None:
        """Have the ranks save a checkpoint."""
        self._crew.send(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill every rank and what it started, now."""
        self._crew.kill()

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to the end of the run; failed, if it is over because of a verdict."""
        try:
            result = super().run(role)
            if result is None:  # torch's "graceful exit": the meeting has no place for this node
                raise RuntimeError("this node was not needed")
            self._rdzv_handler.close_for_all("the run is done")
            return result
        except RendezvousClosedError as closed:
            self.error = LaunchError(f"the run is over: {closed}.")
        except _Over:
            pass
        return RunResult(WorkerState.FAILED)

    # What the elastic agent asks of a subclass.

    def _rendezvous(self, worker_group: Any) -> None:
        """Meet the other launchers, until a world is formed in which all hear of each other."""
        while True:
            self._stop_if_asked()
            try:
                super()._rendezvous(worker_group)
                self._node = worker_group.group_rank
                nodes = worker_group.group_world_size
                self._verdicts = Verdicts(worker_group.store, self._node, nodes)
                me = NodeHistory(self._job.nproc, self._starts, self._history)
                self._members = self._verdicts.exchange(me)
                return
            except WaitingStopped:
                self._stop_if_asked()
                raise
            except (BadMessage, OSError, RuntimeError) as error:
                if isinstance(self._rdzv_handler, LocalRendezvous):
                    raise
                # One of them was gone before the world had formed.
                self._say(f"a world could not form ({error}); the nodes meet again")
                self._pause(_MEET_AGAIN_SECONDS)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_if_asked()
        place, idle = self._find_place(worker_group)
        nodes = self._rdzv_handler.nodes
        several = len(nodes) > 1 and self._job.node_logs
        folder = node_folder(self._node, self._job.host) if several else ""
        self._rank_logs.begin(place.ranks, node=folder)
        self._steps.mark()
        self._started_at = time.monotonic()
        self._crew.start(place)
        if self._node == 0:
            self._post(
                RanksStarted(
                    nproc=place.local_size,
                    attempt=self._rank_logs.attempt,
                    world_size=place.size,
                    nodes=nodes,
                    idle=idle,
                )
            )
        if idle:
            self._say(telling.standing_by(idle, place.size))
        if self._overseer:
            self._overseen = True
            self._overseer.started(
                Started(
                    ranks=self._crew.pids,
                    world_size=place.size,
                    node=self._node,
                    nodes=nodes,
                    address=place.address,
                    port=place.port,
                    round=self._starts - 1,
                    scratch=self._rank_logs.scratch,
                )
            )
        self._on_start(0 in place.ranks)
        return {rank - place.first: pid for rank, pid in self._crew.pids.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks for a moment; if their world has ended, see to what follows."""
        self._wait(_MONITOR_SECONDS)
        verdict = self._look()
        if verdict is not None:
            self._follow(verdict)
            self._pause(verdict.decision.delay)
            self._initialize_workers(worker_group)
        elif self._verdicts.all_done():
            # Idle ranks have "returned" as well, for torch's records.
            everyone = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=everyone)
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Make room for a new world: torch does this alone when nodes wait to join."""
        waiting = self._rdzv_handler.num_nodes_waiting()
        ending = self._ending("node_joined", telling.nodes_waiting(waiting))
        verdict = self._reach(ending)
        self._crew.send(signal.SIGTERM)
        self._crew.wait(self._job.grace)
        self._follow(verdict)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        self._crew.send(death_sig)
        if self._stop_signal is not None:
            self._announce_stop(self._stop_signal)
        self._crew.wait(self._job.grace)
        self._disband()
        self._starter.close()
        if self._stop_signal is signal.SIGINT:
            self._rdzv_handler.close_for_all(telling.interrupted(self._job.host))
        elif self._stop_signal is not None:
            self._rdzv_handler.leave("preempted")

    # The place of this node in a new world.

    def _find_place(self, worker_group: Any) -> tuple[Place, int]:
        """Where the ranks of this node are in the new world, and how many of the world are idle."""
        first, members = worker_group.workers[0], self._members
        # One that has just joined goes by what the others have been through.
        self._history = max((m.history for m in members), key=len)
        restarts = max(member.starts for member in members)
        self._starts = restarts + 1
        total = first.world_size
        used = total if self._job.places is None else self._job.places(total)
        self._world_size = used
        parts = used_parts([member.nproc for member in members], used)
        with_ranks = [node for node, part in enumerate(parts) if part > 0]
        self._verdicts.watch(with_ranks)
        self._parts = parts
        place = Place(
            size=used,
            first=first.global_rank,
            local_size=parts[self._node],
            node=self._node,
            nodes=len(with_ranks),
            address=worker_group.master_addr,
            port=worker_group.master_port,
            restart_count=restarts,
            max_restarts=self._job.limits.max_restarts,
            run_id=self._rdzv_handler.get_run_id(),
        )
        return place, total - used

    # Looking after the ranks.

    def _look(self) -> Verdict | None:
        """The verdict on the world, if it has ended; its ranks here are then ended as well."""
        if (found := self._verdicts.found()) is not None:
            self._end_as_others_say(found)
            return found
        if any(code != 0 for code in self._crew.exit_codes.values()):
            return self._after_exits()
        if self._crew.pids and self._crew.is_done:
            self._verdicts.say_done()
        if self._verdicts.all_done():
            return None
        if (why := self._rdzv_handler.lost()) is not None:
            return self._after_loss(why)
        if self._overseer and (stuck := self._overseer.look()) is not None:
            return self._after_hang(stuck)
        self._crew.kill_those_that_raised(self._job.grace)
        if self._job.standby and (
            self._job.limits.max_restarts or len(self._rdzv_handler.nodes) > 1
        ):
            self._starter.tend_standbys(len(self._crew.pids), moving=self._seem_to_move)
        return None

    def _seem_to_move(self) -> bool:
        """Whether the ranks train; of those who do not tell it is believed after a while."""
        moved = self._steps.moved()
        return time.monotonic() - self._started_at > _MOVING_SECONDS if moved is None else moved

    def _after_exits(self) -> Verdict:
        if all(code in (0, *codes.SAVED_AND_LEFT) for code in self._crew.exit_codes.values()):
            self._crew.wait(self._job.grace)
            self._pause(_MONITOR_SECONDS * 3)  # the same signal may be on its way to this process
        self._crew.end_after_failure(_FAILED_GRACE_SECONDS)
        failures = self._crew.failures()
        first = failure.culprit(failures) if failures else None
        if len(self._rdzv_handler.nodes) > 1 and (first is None or first.lost_peer):
            # Not the fault of this node's ranks: another launcher says why. Unless nobody does.
            seconds = _WHY_SECONDS if first is None else self._rdzv_handler.patience
            if (verdict := self._hear_why(seconds)) is not None:
                return verdict
        self._failures, self._finished = failures, self._crew.finished()
        if first is None:
            return self._reach(self._ending("preemption", "the ranks were told to leave"))
        step, moved, seconds = self._progress()
        ending = failure.ending_of(first, step=step, moved=moved, seconds=seconds)
        return self._reach(ending, rank=first.rank, exit_code=first.exit_code)

    def _hear_why(self, seconds: float) -> Verdict | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (found := self._verdicts.found()) is not None:
                return found
            if (why := self._rdzv_handler.lost()) is not None:
                return self._after_loss(why)
            self._wait(_MONITOR_SECONDS)
        return None

    def _after_loss(self, why: str) -> Verdict:
        if self._rdzv_handler.is_closed():  # somebody ended the run: the ranks may save
            self._crew.send(signal.SIGTERM)
            self._crew.wait(self._job.grace)
            over = Decision(False, 0.0, why)
            return self._reach(self._ending("preemption", why), over)
        self._crew.kill()
        return self._reach(self._ending("node_lost", why))

    def _after_hang(self, stuck: Stuck) -> Verdict:
        self._crew.kill()  # a rank that hangs cannot save
        ending = self._ending("hang", stuck.summary, step=stuck.step)
        decision = None
        if stuck.action == "stop":
            decision = Decision(False, 0.0, "hangs.action is stop")
        return self._reach(ending, decision, rank=next(iter(stuck.ranks), None), exit_code=1)

    def _end_as_others_say(self, verdict: Verdict) -> None:
        if not verdict.orderly:
            self._crew.end_after_failure(_FAILED_GRACE_SECONDS)
            return
        # Ranks agree among themselves to save and leave; a plain script's do not hear of it.
        if not self._crew.wait(self._job.grace / 2):
            self._crew.send(signal.SIGTERM)
            self._crew.wait(self._job.grace / 2)

    # Verdicts: reached, and followed.

    def _ending(self, kind: Any, error: str, *, step: int | None = None) -> Ending:
        last, moved, seconds = self._progress()
        step = last if step is None else step
        return Ending(kind, error, step=step, moved=moved, seconds=seconds)

    def _progress(self) -> tuple[int | None, bool | None, float]:
        seconds = time.monotonic() - self._started_at
        return self._steps.last(), self._steps.moved(), seconds

    def _reach(
        self,
        ending: Ending,
        decision: Decision | None = None,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
    ) -> Verdict:
        """The verdict of all launchers on this ending, which may have been another's."""
        decision = decision or decide([*self._history, ending], self._job.limits)
        log = str(self._rank_logs.log(rank)) if rank in self._crew.pids else ""
        own_error = self._explain(decision) if self._failures else None
        report = "" if own_error is None else str(own_error)
        mine = Verdict(ending, decision, self._host_of(rank), rank, exit_code, log, report)
        counts = self._verdicts.reach(mine)
        if counts is mine:
            for event in telling.events(mine):
                self._post(event)
        if not counts.decision.restart:
            self.error = own_error if counts is mine and own_error else telling.error(counts)
        return counts

    def _host_of(self, rank: int | None) -> str:
        """The machine that ``rank`` is on; this one, where nobody in particular is meant."""
        if rank is not None:
            for host, part in zip(self._rdzv_handler.nodes, self._parts, strict=False):
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

    def _follow(self, verdict: Verdict) -> None:
        """End what is left of the world; raises unless the run goes on."""
        self._disband()
        self._failures, self._finished = [], []
        self._history = [*self._history, verdict.ending]
        if not verdict.decision.restart:
            self.error = self.error or telling.error(verdict)
            self._rdzv_handler.close_for_all(verdict.decision.reason)
            raise _Over
        self._say_restarting(verdict)

    def _say_restarting(self, verdict: Verdict) -> None:
        # Where the run's events are shown, this is among them.
        if self._job.events_dir is None or self._node != 0:
            self._say(telling.restarting(verdict))

    def _announce_stop(self, signum: signal.Signals) -> None:
        """Tell the launchers of the world why the ranks of this one leave."""
        if len(self._rdzv_handler.nodes) < 2 or not self._crew.pids:
            return
        if signum is signal.SIGINT:
            why = telling.interrupted(self._job.host)
            self._reach(self._ending("preemption", why), Decision(False, 0.0, why))
        else:
            self._reach(self._ending("preemption", telling.told_to_leave(self._job.host)))

    def _disband(self) -> None:
        self._verdicts.close()
        self._crew.disband()
        self._starter.stop_loading()
        if self._overseer and self._overseen:
            self._overseen = False
            self._overseer.ended()

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
