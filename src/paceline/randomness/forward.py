"""What an engine holds to draw the random numbers of its forward passes by sample, not by rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import paceline.randomness.draws as draws
from paceline.errors import TrainingError
from paceline.randomness.attribution import WHOLE_BATCH, Attribution, attribute, still_fits
from paceline.randomness.counter import sample_keys
from paceline.randomness.frames import RUNNING, Frame, key_of, watch
from paceline.randomness.keys import words
from paceline.randomness.mode import DrawMode
from paceline.randomness.table import DrawnNumbers, TensorPart, lay_out
from paceline.torch_internals import around_recomputation

_thread = threading.local()


def active() -> ForwardRandomness | None:
    """What the forward pass that runs in this thread draws from; None for torch's own streams."""
    found: ForwardRandomness | None = getattr(_thread, "active", None)
    return found if found is not None and found.current is not None else None


@dataclass
class SampleRows:
    """The samples of one microbatch: by number in the global batch of their step."""

    base: tuple[int, ...]
    numbers: Tensor | None
    """Where it is not known which they are, None."""
    device: torch.device
    _keys: tuple[Tensor, Tensor] | None = None

    @property
    def count(self) -> int | None:
        """How many."""
        return None if self.numbers is None else self.numbers.shape[0]

    def keys(self) -> tuple[Tensor, Tensor]:
        """The key words of the whole batch, and of each sample after it."""
        if self._keys is None:
            numbers = torch.zeros(0) if self.numbers is None else self.numbers
            with_whole = torch.cat([torch.tensor([-1]), numbers.cpu()]).to(torch.int32)
            first, second = sample_keys(with_whole, self.base)
            move = self.device.type != "cpu"
            self._keys = (
                (first.to(self.device), second.to(self.device)) if move else (first, second)
            )
        return self._keys


@dataclass
class _Moment:
    """Where a forward pass stands: enough to run a part of it again."""

    rows: SampleRows
    stack: list[Frame] = field(default_factory=list)


class ForwardRandomness:
    """Draws for the forward passes of one model.

    ``seed`` is the same on all ranks. What cannot be attributed to samples is refused if
    ``strict``, and else left to the rank's own stream and named in ``take_notes``.
    """

    def __init__(self, seed: int, *, strict: bool = False, off: bool = False) -> None:
        self.seed, self.strict = seed, strict
        self.off = off
        """Whether everything is left to the rank's own stream."""
        self.current: SampleRows | None = None
        self.part: TensorPart | None = None
        self.assume_computed = self.only_counts = False
        self.drew = False
        """Whether a forward pass has drawn anything."""
        self.left: dict[str, str] = {}
        """By module: what it draws from the rank's own stream."""
        self._base: tuple[int, ...] = ()
        self._rows: dict[int, tuple[Any, SampleRows]] = {}
        self._seen: dict[tuple[str, int], Attribution] = {}
        self._device = torch.device("cpu")
        self._compiled = False
        self._notes: list[str] = []
        self._told: set[str] = set()
        self._outside = nn.Module()
        self._mode = DrawMode(self)
        _prepare_recomputation()

    def watch(
        self, model: nn.Module, others: Sequence[nn.Module], device: torch.device, *, compiled: bool
    ) -> None:
        """Learn the modules of ``model``, and of ``others`` that hold copies under its names."""
        self._device, self._compiled = device, compiled
        watch([("(loss)", self._outside)], device)
        for root in (model, *others):
            watch(root.named_modules(), device)

    # ------------------------------------------------------------------ steps

    def begin(
        self, purpose: str, step: int | tuple[int, int], rows: Sequence[tuple[Any, Tensor | None]]
    ) -> None:
        """A step begins; ``rows`` are its microbatches and the numbers of their samples."""
        self.current = None
        if self.off:
            return
        self._base = words(4, "paceline randomness", self.seed, purpose, step)
        self._rows = {
            id(part): (part, SampleRows(self._base, numbers, self._device))
            for part, numbers in rows
        }

    def select(self, part: Any, samples: int | None = None) -> None:
        """The microbatch ``part`` comes next; one that the step has not named has ``samples``."""
        if self.off:
            return
        known = self._rows.get(id(part))
        if known is not None:
            self.current = known[1]
        else:
            numbers = None if samples is None else torch.arange(samples)
            self.current = SampleRows(self._base, numbers, self._device)
        if self._compiled:
            self.current.keys()
        RUNNING.stack = [Frame(self._outside, 0)]

    def finish(self) -> None:
        """The forward pass is over."""
        self.current = None
        RUNNING.stack = []

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """What forward passes, and recomputations of their parts, run in."""
        before = getattr(_thread, "active", None)
        _thread.active = self
        try:
            with self._mode:
                yield
        finally:
            _thread.active = before

    def passed_over(self, module: nn.Module) -> None:
        """Another stage of a pipeline runs this call of ``module``."""
        if self.current is not None:
            RUNNING.number(module)

    def take_notes(self) -> list[str]:
        """What there is to tell since this was last asked."""
        notes, self._notes = self._notes, []
        return notes

    def note(self, key: str, text: str) -> None:
        """Tell ``text`` once."""
        if key not in self._told:
            self._told.add(key)
            self._notes.append(text)

    # ------------------------------------------------------------------ drawing

    def numbers(
        self,
        what: Any,
        shape: Sequence[int],
        *,
        computed: bool,
        shared: bool = False,
        **hints: bool,
    ) -> DrawnNumbers | None:
        """The numbers of one draw, as ``paceline.randomness.drawing.Drawing`` says."""
        part, rows = self.part, self.current
        assert rows is not None
        whole = tuple(shape) if part is None else part.shape
        frame = RUNNING.stack[-1]
        number = frame.draws
        frame.draws = number + 1
        if self.only_counts:
            return None
        where: Attribution | None = WHOLE_BATCH
        if not shared:
            where = self._attribute(frame, number, whole, rows.count, computed, hints)
        if where is None:
            self._leave(what, frame, whole, rows.count)
            return None
        if not torch.compiler.is_compiling():
            self.drew = True
        return lay_out(rows.keys(), key_of(frame, number), where, whole, part)

    def _attribute(
        self,
        frame: Frame,
        number: int,
        shape: tuple[int, ...],
        samples: int | None,
        computed: bool,
        hints: dict[str, bool],
    ) -> Attribution | None:
        if not hints and frame.site.kind == "MultiheadAttention":
            hints = {"folded": True}
        elif not hints:
            hints = {"time_first": any(f.site.time_first for f in RUNNING.stack)}
        computed = computed or self.assume_computed
        if torch.compiler.is_compiling():
            return attribute(shape, samples, computed=computed, **hints)
        place = frame.site.name, number
        found = self._seen.get(place)
        found = None if found is None else still_fits(found, shape, samples)
        if found is None:
            found = attribute(shape, samples, computed=computed, **hints)
        if found is not None and samples != 1:
            self._seen[place] = found
        return found

    def _leave(self, what: Any, frame: Frame, shape: tuple[int, ...], samples: int | None) -> None:
        """Refuse a draw that belongs to no samples, or say once that it is the rank's own."""
        module = f"{frame.site.name or 'the model itself'} ({frame.site.kind})"
        why = (
            "it is not known which samples a microbatch holds"
            if samples is None
            else f"none of its dimensions holds the {samples} samples of the microbatch"
        )
        drawn = f"{what.__name__}()"
        told = f"{module} draws {drawn} of shape {shape}, and {why}"
        if self.strict:
            raise TrainingError(
                f"randomness='strict': {told}, so that its numbers would depend on the layout. "
                "Draw a tensor whose first dimension is the batch, or set "
                "randomness='layout-free', which leaves this draw to each rank's own stream."
            )
        self.left[module] = drawn
        self.note(
            module,
            f"randomness: {told}: it comes from each rank's own stream, and so depends on the "
            "layout. randomness='strict' would refuse it",
        )

    def leave(self, what: Any, shape: tuple[int, ...]) -> None:
        """A draw that cannot be controlled is left to the rank's own stream, or refused."""
        assert self.current is not None
        self._leave(what, RUNNING.stack[-1], shape, self.current.count)

    @contextlib.contextmanager
    def on_part(self, part: TensorPart | None) -> Iterator[None]:
        """What is drawn inside is for a ``part`` of a tensor."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def draw(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``function`` of ``draws.HANDLERS`` gives, on plain tensors."""
        result = draws.HANDLERS[function](self, function, args, kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``draw``, for ``functools.partial``."""
        return self.draw(function, args, kwargs)

    # ------------------------------------------------------------------ recomputation

    def moment(self) -> _Moment | None:
        """Where the forward pass stands."""
        if self.current is None:
            return None
        return _Moment(self.current, [frame.copied() for frame in RUNNING.stack])

    @contextlib.contextmanager
    def again(self, moment: _Moment) -> Iterator[None]:
        """As it was at ``moment``, for a part of the forward pass that is run once more."""
        before = self.current, RUNNING.stack, self.part
        self.current, self.part = moment.rows, None
        RUNNING.stack = [frame.copied() for frame in moment.stack]
        inside = getattr(_thread, "active", None) is self
        try:
            with contextlib.nullcontext() if inside else self.forward():
                yield
        finally:
            self.current, RUNNING.stack, self.part = before


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, to be called once more in the backward: with the numbers of its first call."""
    randomness = active()
    moment = None if randomness is None else randomness.moment()
    if randomness is None or moment is None:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        with randomness.again(moment):
            return function(*args, **kwargs)

    return again


_prepared = False


def _prepare_recomputation() -> None:
    global _prepared
    if not _prepared:
        _prepared = True
        around_recomputation(_replayed)
