"""Gradients of one engine on their way between data-parallel ranks, in the forms chosen for them.

Everything here happens in one thread, bucket after bucket in the same order on every rank; each
bucket is exchanged by straight code that waits for its messages. On a CPU that thread is a
``CommunicationThread`` beside the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.options import Compression, Form
from paceline.sync.compressed.formats import HALF, Cast, Format, Plain, Trip, Turn
from paceline.sync.compressed.powersgd import PowerSGD
from paceline.sync.compressed.quantise import Quantised, int8, signs
from paceline.sync.compressed.topk import RandomK, TopK
from paceline.sync.wire import Wire, ring_bytes

_NO_FORM = Form("none")
_FORMS_PER_BUCKET = 64


class Kept(NamedTuple):
    """What rounding sums lost on this rank, in one bucket: a stretch of its gradients in a row."""

    sizes: Mapping[str, int]
    """The bucket's parameters and how many elements each has, in their order there."""
    start: int
    values: Tensor

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """The stretch by parameter: its name, the first element, and the values from there on."""
        at = 0
        for name, size in self.sizes.items():
            first, last = max(self.start, at), min(self.start + len(self.values), at + size)
            if first < last:
                yield name, first - at, self.values[first - self.start : last - self.start]
            at += size


@dataclass
class ExchangeMemory:
    """What one rank's next step needs of the steps before; part of a checkpoint.

    In units of the gradient of the mean loss, whatever a scaler multiplies it with on the way.
    """

    residuals: dict[str, Tensor] = field(default_factory=dict)
    """Residuals: what this rank has not sent yet, by parameter."""
    right: dict[str, Tensor] = field(default_factory=dict)
    """Where PowerSGD goes on, by parameter; equal on all ranks."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """What rounding sums lost here, by slot."""


class Exchange:
    """Averages gradients over a wire.

    ``names`` are those of the parameters in the whole model, by identity. ``whole`` says that each
    rank of the wire holds whole parameters, not tensor-parallel parts of them.
    """

    def __init__(
        self, options: Compression, names: Mapping[int, str], wire: Wire, *, whole: bool = True
    ) -> None:
        self.options = options
        self.wire = wire
        self.memory = ExchangeMemory()
        self.loaded_kept: dict[str, Tensor] = {}
        """What rounding sums lost, by parameter, from a checkpoint: each bucket takes its part."""
        self.step = 0
        """How many steps were done before this one: set by the engine."""
        self.unit = 1.0
        """What the gradients given here are to be divided by to be those of the mean loss."""
        self.left_plain: set[str] = set()
        """Parameters that travel as they are, whatever the options say."""
        self.embeddings: set[str] = set()
        """Parameters that are embeddings."""
        self.alike: set[str] = set()
        """Parameters that other ranks exchange, too, and that must come out equal there."""
        self.plain = 0.0
        """Bytes that would have been sent so far as they are, in a ring."""
        self._names = names
        self._whole = whole
        self._forms: dict[str, Form] = {}  # by parameter
        self._formats: dict[Form, Format | PowerSGD] = {}
        self._next = ExchangeMemory()
        self._all_sent: set[str] = set()

    @property
    def warming_up(self) -> bool:
        """Whether everything still travels as it is."""
        return self.step < self.options.warmup

    @torch.no_grad()
    def average(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], slot: int
    ) -> None:
        """Replace ``gradients`` by the means over all ranks of what they sent. A collective."""
        self.plain += sum(ring_bytes(gradient, self.wire.size) for gradient in gradients)
        named = {self._names[id(p)]: g for p, g in zip(parameters, gradients, strict=True)}
        for number, (form, chosen) in enumerate(self.by_form(named)):
            # A slot for each form of each bucket: what is kept of sums belongs to one of them.
            turn = Turn(self.step, slot * _FORMS_PER_BUCKET + number)
            codec = self.format_of(form)
            if isinstance(codec, PowerSGD):
                self._factor(codec, chosen, turn)
            else:
                self._send(codec, chosen, turn)

    def settle(self, *, applied: bool, unused: Iterable[str] = ()) -> None:
        """The step is over. What was sent counts as sent only if the step was ``applied``.

        ``unused`` are parameters that no rank has used, which therefore were left alone.
        """
        if applied:
            skipped = set(unused)
            for name in self._all_sent - skipped:
                self.memory.residuals.pop(name, None)
            left = self._next.residuals
            self.memory.residuals |= {n: r for n, r in left.items() if n not in skipped}
            self.memory.right |= self._next.right
            self.memory.kept |= self._next.kept
            self.loaded_kept.clear()
        self._next = ExchangeMemory()
        self._all_sent.clear()

    def fold_kept(self) -> None:
        """Have this rank send again what rounding sums lost here: buckets will be others now."""
        for kept in self.memory.kept.values():
            for name, first, values in kept.parts():
                residual = self.memory.residuals.get(name)
                if residual is not None:  # which goes into the mean with a share of one rank
                    residual.view(-1)[first : first + len(values)] += values * self.wire.size
        self.memory.kept.clear()

    def by_form(self, gradients: Mapping[str, Tensor]) -> list[tuple[Form, dict[str, Tensor]]]:
        """The gradients by the form that each travels in, those that are ``alike`` by themselves.

        What an element becomes depends on those it travels with.
        """
        groups: dict[tuple[Form, bool], dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            form = self._form_of(name, tuple(gradient.shape))
            groups.setdefault((form, name in self.alike), {})[name] = gradient
        return [(form, chosen) for (form, _), chosen in groups.items()]

    def _form_of(self, name: str, shape: tuple[int, ...]) -> Form:
        if self.warming_up or self.wire.size == 1 or name in self.left_plain:
            return _NO_FORM
        if name not in self._forms:
            form = self.options.form_of(name, shape, is_embedding=name in self.embeddings)
            codec = self.format_of(form)
            pays = not isinstance(codec, PowerSGD) or codec.pays_for(shape)
            self._forms[name] = form if pays else _NO_FORM
        return self._forms[name]

    def why_plain(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a parameter travelled as it is in a step after the warm-up; ``None``: it did not."""
        if name in self.left_plain:
            return "tied over pipeline stages"
        if name not in self._forms or self._forms[name] != _NO_FORM:
            return None
        is_embedding = name in self.embeddings
        option = self.options.left_alone_by(name, shape, is_embedding=is_embedding)
        return "factors would be no smaller" if option is None else f"compress.{option}"

    def format_of(self, form: Form) -> Format | PowerSGD:
        """What sends gradients in ``form``."""
        if form not in self._formats:
            self._formats[form] = make_format(form, self.options.seed, in_stretches=self._whole)
        return self._formats[form]

    def feeds_back(self, codec: Format | PowerSGD) -> bool:
        """Whether what ``codec`` does not send is to be sent later."""
        wanted = self.options.error_feedback
        if isinstance(codec, Plain):
            return False
        return codec.feedback if wanted is None else wanted

    def _send(self, codec: Format, gradients: dict[str, Tensor], turn: Turn) -> None:
        sizes = {name: gradient.numel() for name, gradient in gradients.items()}
        values = torch.cat([self.due(n, g).flatten() for n, g in gradients.items()])
        feeds_back = self.feeds_back(codec)
        kept = self._kept(codec, turn.slot, sizes, values)
        sent = codec.mean(values, Trip(self.wire, turn, kept, wants_own=feeds_back))
        if sent.kept is not None and feeds_back:
            start = self.wire.rank * len(sent.kept)
            self._next.kept[turn.slot] = Kept(sizes, start, self._in_units(sent.kept))
        left = None if sent.own is None else (values - sent.own).split(list(sizes.values()))
        means = sent.mean.split(list(sizes.values()))
        for index, (name, gradient) in enumerate(gradients.items()):
            gradient.copy_(means[index].view_as(gradient))
            self.leave(name, None if left is None else left[index].view_as(gradient))

    def _factor(self, codec: PowerSGD, gradients: dict[str, Tensor], turn: Turn) -> None:
        values = {n: self.due(n, g) for n, g in gradients.items()}
        # The means are written over the gradients, and what is left is the difference of both.
        values = {n: v.clone() if v is gradients[n] else v for n, v in values.items()}
        found = codec.means(values, self.memory.right | self._next.right, self.wire, turn)
        self._next.right |= found.right
        for name, gradient in gradients.items():
            found.write(name, gradient)
            self.leave(name, values[name].sub_(gradient) if self.feeds_back(codec) else None)

    def due(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient and its residual from earlier steps, whatever form it is sent in.

        The very same tensor, where there is no residual.
        """
        residual = self._next.residuals.get(name)
        if residual is None and name not in self._all_sent:
            residual = self.memory.residuals.get(name)
        if residual is None:
            return gradient
        residual = residual.to(gradient)
        return gradient + residual if self.unit == 1 else gradient + residual * self.unit

    def leave(self, name: str, rest: Tensor | None) -> None:
        """Note what this step has not sent of a gradient; ``None``: everything was.

        ``rest`` is kept, and must be nobody else's.
        """
        if rest is None:
            self._next.residuals.pop(name, None)
            self._all_sent.add(name)
        else:
            self._next.residuals[name] = self._in_units(rest)

    def _in_units(self, values: Tensor) -> Tensor:
        return values if self.unit == 1 else values / self.unit

    def _kept(
        self, codec: Format, slot: int, sizes: Mapping[str, int], values: Tensor
    ) -> Tensor | None:
        """What rounding the last sum of this bucket lost here."""
        kept = self._next.kept.get(slot) or self.memory.kept.get(slot)
        if kept is not None and list(kept.sizes.items()) == list(sizes.items()):
            return kept.values.to(values) * self.unit
        has_loaded = any(name in self.loaded_kept for name in sizes)
        if not has_loaded or not isinstance(codec, Quantised):
            return None
        length = codec.stretch(values.numel(), self.wire.size)
        row = values.new_zeros(length * self.wire.size)
        at = 0
        for name, size in sizes.items():
            if (loaded := self.loaded_kept.get(name)) is not None:
                row[at : at + size] = loaded.to(values)
            at += size
        return row.chunk(self.wire.size)[self.wire.rank].clone().mul_(self.unit)


def make_format(form: Form, seed: int, *, in_stretches: bool = True) -> Format | PowerSGD:
    """What sends gradients in a form."""
    then = None if form.then is None else HALF[form.then]
    if form.name in HALF:
        return Cast(HALF[form.name])
    if form.name == "topk":
        return TopK(form.number or 0.0, then)
    if form.name == "randomk":
        return RandomK(form.number or 0.0, seed, then)
    if form.name == "powersgd":
        return PowerSGD(int(form.number or 1), seed, then)
    if form.name == "int8":
        return int8(in_stretches=in_stretches)
    if form.name == "sign":
        return signs(in_stretches=in_stretches)
    return Plain()
