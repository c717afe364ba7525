"""The outer loop of local SGD: what replicas share, and the outer steps that they take together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.options import LocalSteps
from paceline.options.local_steps import fragments_of
from paceline.sync.communication_thread import CommunicationThread
from paceline.sync.compressed.exchange import Exchange
from paceline.sync.outer_step import OuterOptimizer, OuterStep, difference
from paceline.sync.replica import Replica
from paceline.sync.wire import Wire
from paceline.world import World
from paceline.world.group import backend_by_device
from paceline.world.sealing import sealed


class OuterLoop:
    """The outer loop of one replica, around the steps that it does by itself.

    ``outer`` holds the shared model, which outer steps move. Between them a replica's own
    parameters are the model's.
    """

    def __init__(self, options: LocalSteps, replica: Replica, *, checks: bool) -> None:
        """A collective. ``checks``: a replica that is not finite any more is left out."""
        self.options = options
        self.outer = OuterOptimizer(options)
        self.buffers: dict[str, Tensor] = {}
        """Persistent floating-point buffers as of the last outer step."""
        self.begun = False
        self.is_synchronised = True
        """Whether all replicas have one model since the end of the last step."""
        self.counted: list[Tensor] = []
        """The items that this replica's loss counted since each fragment's last outer step."""
        self.stepped_at: list[int] = []
        """The step after which each fragment's last outer step began."""
        self.outer_steps = 0
        self.pending: deque[OuterStep] = deque()
        self.fragments: list[list[str]] = []
        """The parameters that take outer steps together."""
        self.exchanges: list[Exchange] = []
        """One for each fragment."""
        self._replica, self._world, self._checks = replica, replica.world, checks
        self.wire = _make_wire(replica.world)
        self.courier = CommunicationThread()
        on_gpu = replica.device.type == "cuda"
        self._stream = torch.cuda.Stream(replica.device) if on_gpu else None

    # ------------------------------------------------------------------ steps

    def begin(self) -> None:
        """The replicas, which have the same parameters, share those from now on. A collective."""
        self._replica.sync_buffers()
        self.adopt()

    def adopt(self) -> None:
        """Share this replica's parameters and buffers, which are equal on all of them."""
        self.outer.take(self._trained())
        self.buffers = {name: b.detach().clone() for name, b in self._own_buffers().items()}
        self._cut()
        device, count = self._replica.device, self.options.fragments
        self.counted = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(count)]
        self.stepped_at = [self._replica.steps_done] * count
        self.begun = True

    def forget(self) -> None:
        """Another model was loaded: the next step begins anew, from that."""
        self.pending.clear()
        self.outer = OuterOptimizer(self.options)
        self.exchanges = []
        self.begun, self.is_synchronised = False, True

    def count(self, items: Tensor) -> None:
        """This replica's loss has counted so many items more."""
        for counted in self.counted:
            counted += items

    def follow_freezing(self) -> None:
        """Parameters that are trained from now on are shared, too; all replicas have them equal."""
        if self.begun:
            for name, parameter in self._trained().items():
                self.outer.shared.setdefault(name, parameter.detach().clone())
            self._cut()

    def apply_due(self) -> None:
        """Take over the outer steps whose time it is."""
        while self.pending and self.pending[0].due <= self._replica.steps_done:
            self._apply(self.pending.popleft())

    def synchronise(self) -> bool:
        """Take every outer step that is not taken at this step now; whether there were any."""
        moved = bool(self.pending)
        while self.pending:
            self._apply(self.pending.popleft())
        for fragment, step in enumerate(self.stepped_at):
            if step != self._replica.steps_done:
                self.start(fragment, 0)
                moved = True
        self.is_synchronised = True
        return moved

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[None]:
        """The model with the shared parameters and buffers, for an evaluation."""
        if not self.begun:
            yield
            return
        if self._stream is not None:
            # An evaluation communicates, too: on a GPU, two threads with a communicator each may
            # keep each other's kernels from running, on two ranks in another order.
            self.finish_pending()
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
        self.courier.close()

    # ------------------------------------------------------------------ outer steps

    def start(self, fragment: int, overlap: int) -> None:
        """Begin an outer step of one fragment; it is taken over ``overlap`` steps later.

        Without overlap it waits for the other replicas: settle the step before.
        """
        outer_step = self._prepare(fragment, overlap)
        self.stepped_at[fragment] = self._replica.steps_done
        self.counted[fragment] = torch.zeros_like(self.counted[fragment])
        number, self.outer_steps = self.outer_steps, self.outer_steps + 1
        if overlap:
            outer_step.total = self._send(outer_step, number)
            self.pending.append(outer_step)
            return
        with self._world.pulse.during("waiting"):
            outer_step.total = self._average(outer_step, number)
        self._apply(outer_step)
        self.is_synchronised = True

    @torch.no_grad()
    def _prepare(self, fragment: int, overlap: int) -> OuterStep:
        """How far this replica came; a replica that is not finite any more is left out."""
        names = self.fragments[fragment]
        own = {name: self.held(name).detach() for name in names}
        gradients = self.outer.outer_gradients(names, own)
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
        snapshot = {name: tensor.clone() for name, tensor in own.items()} if overlap else None
        is_finite = not self._checks or all(bool(g.isfinite().all()) for g in gradients)
        if not is_finite:
            weight.zero_()
            snapshot = None  # what it did since is worth nothing, either
        if not is_finite or not bool(weight > 0):
            for distance in (*gradients, *buffers.values()):
                distance.zero_()
        due = self._replica.steps_done + overlap
        return OuterStep(fragment, due, names, gradients, buffers, weight, snapshot)

    def _send(self, outer_step: OuterStep, number: int) -> torch.futures.Future[Tensor]:
        """Exchange how far replicas came, beside the next steps."""
        if self._stream is None:
            return self.courier.send(lambda: self._average(outer_step, number))
        stream = self._stream
        ready = torch.cuda.current_stream(self._replica.device).record_event()

        def beside() -> Tensor:
            stream.wait_event(ready)
            return self._average(outer_step, number)

        return self.courier.send(beside, stream)

    @torch.no_grad()
    def _average(self, outer_step: OuterStep, number: int) -> Tensor:
        """Turn what replicas send into means over them, by their weights."""
        wire, buffers = self.wire, outer_step.buffers
        changed = [bool(distance.any()) for distance in buffers.values()]
        told = torch.tensor([0.0, *changed], dtype=torch.float64).to(outer_step.weight)
        told[0] = outer_step.weight
        told = wire.sum(told)
        total = told[0]
        if not bool(total > 0):
            return total
        share = wire.size * outer_step.weight / total
        for distance in (*outer_step.gradients, *buffers.values()):
            distance.mul_(share.to(distance))
        exchange = self.exchanges[outer_step.fragment]
        exchange.step = number
        parameters = [self.held(name) for name in outer_step.names]
        exchange.average(parameters, outer_step.gradients, slot=0)
        exchange.settle(applied=True)
        moving = [
            b for b, any_changed in zip(buffers.values(), told[1:], strict=True) if any_changed
        ]
        _average_together(moving, wire)
        return total

    @torch.no_grad()
    def _apply(self, outer_step: OuterStep) -> None:
        """Move the shared model, and this replica's with it."""
        with self._world.pulse.during("waiting"):
            outer_step.wait()
        self.move_shared(outer_step)
        shared = {name: self.outer.shared[name] for name in outer_step.names}
        held: dict[str, Tensor] = {name: self.held(name).detach() for name in shared}
        if outer_step.buffers:
            shared |= {name: self.buffers[name] for name in outer_step.buffers}
            held |= self._own_buffers()
        for name, new in shared.items():
            if outer_step.snapshot is not None:
                new = new + difference(held[name], outer_step.snapshot[name])
            held[name].copy_(new)

    @torch.no_grad()
    def move_shared(self, outer_step: OuterStep) -> None:
        """Move the shared model by an outer step; nothing where no replica had items."""
        if bool(outer_step.wait() > 0):
            self.outer.step(outer_step.names, outer_step.gradients)
            for name, distance in outer_step.buffers.items():
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
        """Whether this replica's parameters are the shared ones: all have just taken a step."""
        done = self._replica.steps_done
        return not self.pending and all(step == done for step in self.stepped_at)

    def finish_pending(self) -> None:
        """Wait until outer steps under way are exchanged; they are taken over when due."""
        with self._world.pulse.during("waiting"):
            for outer_step in self.pending:
                outer_step.wait()

    def held(self, name: str) -> nn.Parameter:
        """This replica's own parameter."""
        return self._replica.spread.held[name][0]

    def _trained(self) -> dict[str, Tensor]:
        held = self._replica.spread.held
        return {name: own[0] for name, own in held.items() if own[0].requires_grad}

    def _cut(self) -> None:
        names = [name for name in self._replica.spread.held if name in self.outer.shared]
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
        ids = {id(own[0]): name for name, own in self._replica.spread.held.items()}
        self.exchanges = []
        for names in self.fragments:
            exchange = Exchange(self.options.compression, ids, self.wire)
            exchange.memory.residuals = {n: residuals[n] for n in names if n in residuals}
            exchange.memory.right = {n: right[n] for n in names if n in right}
            self.exchanges.append(exchange)

    def _own_buffers(self) -> dict[str, Tensor]:
        model = self._replica.model
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
