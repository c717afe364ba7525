"""The rounds of local steps: a replica that trains alone, and its meetings with the others."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compress.courier import Courier
from paceline.compress.exchange import Exchange
from paceline.compress.local_steps import Outer
from paceline.compress.wire import Wire
from paceline.engine.late import LateNumbers, LateQueue
from paceline.engine.nonfinite import Problem
from paceline.engine.result import Numbers
from paceline.options import LocalSteps
from paceline.options.local_steps import fragments_of
from paceline.world import World
from paceline.world.group import backend_by_device
from paceline.world.sealing import sealed

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass
class Meeting:
    """One fragment's meeting, from when the replicas tell how far they came."""

    fragment: int
    due: int
    """The step after which its result is taken over."""
    names: list[str]
    distances: list[Tensor]
    """How far this replica came since the last meeting; the mean over all once they have met."""
    buffers: dict[str, Tensor]
    """The same of the buffers that meet with this fragment."""
    weight: Tensor
    """The items that this replica's loss counted since then: 0 leaves it out."""
    then: dict[str, Tensor] | None
    """Its parameters and buffers at the time, where steps go on meanwhile."""
    total: torch.futures.Future[Tensor] | Tensor | None = field(default=None)
    """The weights of all replicas added up, once they have met."""

    def means(self) -> dict[str, Tensor]:
        """What the meeting came to, by parameter and buffer, once it is over."""
        return dict(zip(self.names, self.distances, strict=True)) | self.buffers

    def wait(self) -> Tensor:
        """Until the replicas have met."""
        if isinstance(self.total, torch.futures.Future):
            self.total = self.total.wait()
        assert self.total is not None
        return self.total


class Rounds:
    """One replica's rounds, as its engine drives them.

    ``outer`` holds the shared model, which meetings move. Between meetings a replica's own
    parameters are the model's.
    """

    def __init__(self, options: LocalSteps, engine: Engine) -> None:
        self.options = options
        self.outer = Outer(options)
        self.buffers: dict[str, Tensor] = {}
        """Persistent floating-point buffers as of the last meeting."""
        self.begun = False
        self.together = True
        """Whether all replicas have met at the end of the last step."""
        self.counted: list[Tensor] = []
        """The items that this replica's loss counted since each fragment's last meeting."""
        self.met_at: list[int] = []
        """The step of each fragment's last meeting."""
        self.meetings = 0
        self.steps_alone = 0
        """Steps that this replica has done by itself."""
        self.pending: deque[Meeting] = deque()
        self._engine, self._world = engine, engine.world
        self.fragments: list[list[str]] = []
        """The parameters that meet together."""
        self.exchanges: list[Exchange] = []
        """One for each fragment."""
        self.wire = _make_wire(engine.world)
        self._courier = Courier()
        on_gpu = engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device) if on_gpu else None
        world, has_others = engine.world, self.wire.size > 1
        self._numbers = world.background_group("numbers") if has_others else None
        self._nonfinite = engine.options["nonfinite"]
        self._late = LateQueue(engine.device, stop=self._nonfinite == "stop")
        # Replicas leave at different times: what they are telling each other must arrive.
        world.before_close(self._late.finish)
        world.before_close(self._courier.close)

    # ------------------------------------------------------------------ steps

    def start_step(self) -> bool:
        """A step begins; whether it waits for no other replica."""
        if not self.options.is_alone(self._engine.steps_done):
            if self.begun:  # a state from before the first round was loaded
                self.forget()
            return False
        if not self.begun:
            self.begin()
        self.together = False
        return True

    def begin(self) -> None:
        """The replicas, which have the same parameters, share those from now on. A collective."""
        self._engine._sync_buffers()
        self.adopt()

    def adopt(self) -> None:
        """Share this replica's parameters and buffers, which are equal on all of them."""
        self.outer.take(self._trained())
        self.buffers = {name: b.detach().clone() for name, b in self._own_buffers().items()}
        self._cut()
        device, count = self._engine.device, self.options.fragments
        self.counted = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(count)]
        self.met_at = [self._engine.steps_done] * count
        self.begun = True

    def forget(self) -> None:
        """Another model was loaded: the next step begins anew, from that."""
        self.pending.clear()
        self.outer = Outer(self.options)
        self.exchanges = []
        self.begun, self.together = False, True

    def follow_freezing(self) -> None:
        """Parameters that are trained from now on are shared, too; all replicas have them equal."""
        if self.begun:
            for name, parameter in self._trained().items():
                self.outer.shared.setdefault(name, parameter.detach().clone())
            self._cut()

    def finish_step(
        self, numbers: Numbers, problem: Problem | None, counted: Tensor
    ) -> LateNumbers:
        """A step is done; the world's numbers of it. Replicas meet where it is time to."""
        if problem is None:
            for items in self.counted:
                items += counted
        self.steps_alone += 1
        step = self._engine.steps_done
        looks = self._nonfinite != "ignore"
        late = LateNumbers(step, numbers, problem, self._world, self._numbers, looks=looks)
        self._late.add(late)
        while self.pending and self.pending[0].due <= step:
            self._take_over(self.pending.popleft())
        fragment = self.options.meeting(step)
        if fragment is not None:
            self._meet(fragment, self.options.overlap)
        return late

    def settle(self) -> None:
        """Wait until all replicas are through with the last step; raises where one had to stop."""
        self._late.settle()

    def meet(self) -> bool:
        """Let everything that has not met at this step meet now; whether anything did."""
        if not self.begun:
            return False
        self.settle()
        moved = bool(self.pending)
        while self.pending:
            self._take_over(self.pending.popleft())
        for fragment, step in enumerate(self.met_at):
            if step != self._engine.steps_done:
                self._meet(fragment, 0)
                moved = True
        self.together = True
        return moved

    @contextlib.contextmanager
    def shared_in(self) -> Iterator[None]:
        """The model with the shared parameters and buffers, for an evaluation."""
        if not self.begun:
            yield
            return
        buffers = self._own_buffers()
        own = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self._swap_parameters()
        _copy_into(buffers, self.buffers)
        try:
            yield
        finally:
            self._swap_parameters()
            _copy_into(buffers, own)

    def close(self) -> None:
        """End its thread, after what is under way."""
        self._courier.close()

    # ------------------------------------------------------------------ meetings

    def _meet(self, fragment: int, overlap: int) -> None:
        meeting = self._prepare(fragment, overlap)
        self.met_at[fragment] = self._engine.steps_done
        self.counted[fragment] = torch.zeros_like(self.counted[fragment])
        number, self.meetings = self.meetings, self.meetings + 1
        if overlap:
            meeting.total = self._send(meeting, number)
            self.pending.append(meeting)
            return
        self.settle()  # a replica that has to stop does so before the others take over anything
        with self._world.pulse.during("waiting"):
            meeting.total = self._exchange(meeting, number)
        self._take_over(meeting)
        self.together = True

    @torch.no_grad()
    def _prepare(self, fragment: int, overlap: int) -> Meeting:
        """How far this replica came; a replica that is not finite any more is left out."""
        names = self.fragments[fragment]
        own = {name: self.held(name).detach() for name in names}
        distances = self.outer.distances(names, own)
        buffers: dict[str, Tensor] = {}
        if fragment == self.options.fragments - 1:
            held = self._own_buffers()
            own |= held
            buffers = {
                name: difference(shared, held[name])
                for name, shared in self.buffers.items()
                if name in held
            }
        weight = self.counted[fragment].clone()
        then = {name: tensor.clone() for name, tensor in own.items()} if overlap else None
        looks = self._nonfinite != "ignore"
        is_finite = not looks or all(bool(d.isfinite().all()) for d in distances)
        if not is_finite:
            weight.zero_()
            then = None  # what it did since is worth nothing, either
        if not is_finite or not bool(weight > 0):
            for distance in (*distances, *buffers.values()):
                distance.zero_()
        due = self._engine.steps_done + overlap
        return Meeting(fragment, due, names, distances, buffers, weight, then)

    def _send(self, meeting: Meeting, number: int) -> torch.futures.Future[Tensor]:
        """Have the replicas meet beside the next steps."""
        if self._stream is None:
            return self._courier.send(lambda: self._exchange(meeting, number))
        stream = self._stream
        ready = torch.cuda.current_stream(self._engine.device).record_event()

        def beside() -> Tensor:
            stream.wait_event(ready)
            return self._exchange(meeting, number)

        return self._courier.send(beside, stream)

    @torch.no_grad()
    def _exchange(self, meeting: Meeting, number: int) -> Tensor:
        """Turn a meeting's distances into means over the replicas, by their weights."""
        wire, buffers = self.wire, meeting.buffers
        changed = [bool(distance.any()) for distance in buffers.values()]
        told = torch.tensor([0.0, *changed], dtype=torch.float64).to(meeting.weight)
        told[0] = meeting.weight
        told = wire.sum(told)
        total = told[0]
        if not bool(total > 0):
            return total
        share = wire.size * meeting.weight / total
        for distance in (*meeting.distances, *buffers.values()):
            distance.mul_(share.to(distance))
        exchange = self.exchanges[meeting.fragment]
        exchange.step = number
        parameters = [self.held(name) for name in meeting.names]
        exchange.average(parameters, meeting.distances, slot=0)
        exchange.settle(applied=True)
        moving = [
            b for b, any_changed in zip(buffers.values(), told[1:], strict=True) if any_changed
        ]
        _average_together(moving, wire)
        return total

    @torch.no_grad()
    def _take_over(self, meeting: Meeting) -> None:
        """Move the shared model, and this replica's with it."""
        with self._world.pulse.during("waiting"):
            meeting.wait()
        self.move_shared(meeting)
        shared = {name: self.outer.shared[name] for name in meeting.names}
        held: dict[str, Tensor] = {name: self.held(name).detach() for name in shared}
        if meeting.buffers:
            shared |= {name: self.buffers[name] for name in meeting.buffers}
            held |= self._own_buffers()
        for name, new in shared.items():
            if meeting.then is not None:
                new = new + difference(held[name], meeting.then[name])
            held[name].copy_(new)

    @torch.no_grad()
    def move_shared(self, meeting: Meeting) -> None:
        """Move the shared model by what a meeting came to; nothing where no replica had items."""
        if bool(meeting.wait() > 0):
            self.outer.step(meeting.names, meeting.distances)
            for name, distance in meeting.buffers.items():
                self.buffers[name] -= distance

    @torch.no_grad()
    def take_shared(self) -> None:
        """Make this replica's parameters and buffers the shared ones."""
        for name, shared in self.outer.shared.items():
            self.held(name).copy_(shared)
        _copy_into(self._own_buffers(), self.buffers)

    # ------------------------------------------------------------------ what it holds

    @property
    def is_shared(self) -> bool:
        """Whether this replica's parameters are the shared ones: all have just met."""
        done = self._engine.steps_done
        return not self.pending and all(step == done for step in self.met_at)

    def finish_meetings(self) -> None:
        """Wait until meetings that are under way have taken place; they are taken over when due."""
        with self._world.pulse.during("waiting"):
            for meeting in self.pending:
                meeting.wait()

    def held(self, name: str) -> nn.Parameter:
        """This replica's own parameter."""
        return self._engine.spread.held[name][0]

    def _trained(self) -> dict[str, Tensor]:
        held = self._engine.spread.held
        return {name: own[0] for name, own in held.items() if own[0].requires_grad}

    def _cut(self) -> None:
        names = [name for name in self._engine.spread.held if name in self.outer.shared]
        sizes = [self.outer.shared[name].numel() for name in names]
        cut = fragments_of(sizes, self.options.fragments)
        self.fragments = [[names[place] for place in part] for part in cut]
        self._renew_exchanges()

    def _renew_exchanges(self) -> None:
        """An exchange for each fragment, with what was not sent yet of its parameters."""
        for exchange in self.exchanges:
            exchange.fold_kept()
        residuals = {n: r for e in self.exchanges for n, r in e.memory.residuals.items()}
        right = {n: r for e in self.exchanges for n, r in e.memory.right.items()}
        ids = {id(own[0]): name for name, own in self._engine.spread.held.items()}
        self.exchanges = []
        for names in self.fragments:
            exchange = Exchange(self.options.compression, ids, self.wire)
            exchange.memory.residuals = {n: residuals[n] for n in names if n in residuals}
            exchange.memory.right = {n: right[n] for n in names if n in right}
            self.exchanges.append(exchange)

    def _own_buffers(self) -> dict[str, Tensor]:
        model = self._engine.model
        if next(model.buffers(), None) is None:
            return {}
        saved = model.state_dict(keep_vars=True)
        return {
            name: buffer
            for name, buffer in model.named_buffers()
            if name in saved and buffer.is_floating_point() and buffer.numel()
        }

    def _swap_parameters(self) -> None:
        shared = self.outer.shared
        for name in shared:
            parameter = self.held(name)
            parameter.data, shared[name] = shared[name], parameter.data


def difference(one: Tensor, other: Tensor) -> Tensor:
    """``one - other``; nothing where they are equal, as infinities in a mask are."""
    return torch.where(one == other, 0.0, one - other).to(one.dtype)


def _average_together(tensors: list[Tensor], wire: Wire) -> None:
    """Replace each by its mean over the wire, with one message for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        flat = wire.sum(torch.cat([tensor.flatten() for tensor in alike])).div_(wire.size)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if name in targets:
            targets[name].copy_(value)


def _make_wire(world: World) -> Wire:
    """A wire for a thread of its own. A collective."""
    if world.size == 1:
        return Wire(None)
    group = world.everyone.process_group
    if backend_by_device(group).get(world.device.type) == "nccl":
        with sealed(dist.get_backend()):
            return Wire(dist.new_group(timeout=world.timeout))
    return Wire(world.background_group("local steps"))
