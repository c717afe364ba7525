"""Gradients of one engine on their way between data-parallel ranks, in the forms chosen for them.

Everything here happens in one thread, bucket after bucket in the same order on every rank; each
bucket is exchanged by straight code that waits for its messages. On a CPU that thread is a
:class:`~paceline.compress.courier.Courier` beside the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compress.formats import HALF, Cast, Drawn, Format, Largest, Plain, Turn
from paceline.compress.options import Compression, Form
from paceline.compress.powersgd import PowerSGD
from paceline.compress.quantised import Quantised, int8, signs
from paceline.compress.wire import Wire

_NO_FORM = Form("none")


class Exchange:
    """Averages gradients over a group.

    ``names`` are those of the parameters in the whole model, by identity. ``residuals`` is what
    this rank has not sent yet, by name; it is part of a checkpoint.
    """

    def __init__(
        self, options: Compression, names: Mapping[int, str], group: dist.ProcessGroup
    ) -> None:
        self.options = options
        self.wire = Wire(group)
        self.step = 0
        self.residuals: dict[str, Tensor] = {}
        self._names = names
        self._formats: dict[Form, Format | PowerSGD] = {}
        self._pending: dict[str, Tensor] = {}

    @property
    def warming_up(self) -> bool:
        """Whether everything still travels as it is."""
        return self.step < self.options.warmup_steps

    @torch.no_grad()
    def average(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], slot: int
    ) -> None:
        """Replace ``gradients`` by the means over all ranks of what they sent. A collective."""
        for number, (form, chosen) in enumerate(self._by_form(parameters, gradients)):
            # A slot for each form of each bucket: what a format remembers belongs to one of them.
            turn = Turn(self.step, slot * 64 + number)
            codec = self._format(form)
            if isinstance(codec, PowerSGD):
                self._factor(codec, chosen, turn)
            else:
                self._send(codec, chosen, turn)

    def settle(self, *, applied: bool) -> None:
        """The step is over. What was sent counts as sent only if the step was ``applied``."""
        if applied:
            self.residuals |= self._pending
        self._pending = {}
        self.step += 1

    def _by_form(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> Iterator[tuple[Form, dict[str, Tensor]]]:
        groups: dict[Form, dict[str, Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            name = self._names[id(parameter)]
            shape = tuple(gradient.shape)
            form = _NO_FORM if self.warming_up else self.options.form_of(name, shape)
            codec = self._format(form)
            if isinstance(codec, PowerSGD) and not codec.pays_for(shape):
                form = _NO_FORM
            groups.setdefault(form, {})[name] = gradient
        yield from groups.items()

    def _format(self, form: Form) -> Format | PowerSGD:
        if form not in self._formats:
            self._formats[form] = make_format(form, self.options.seed)
        return self._formats[form]

    def _feeds_back(self, codec: Format | PowerSGD) -> bool:
        wanted = self.options.error_feedback
        if isinstance(codec, Plain):
            return False
        return codec.feedback if wanted is None else wanted

    def _send(self, codec: Format, gradients: dict[str, Tensor], turn: Turn) -> None:
        feeds_back = self._feeds_back(codec)
        values = torch.cat([self._due(n, g, feeds_back).flatten() for n, g in gradients.items()])
        mean, sent = codec.mean(values, self.wire, turn)
        sizes = [gradient.numel() for gradient in gradients.values()]
        left = (values - sent).split(sizes) if feeds_back else [None] * len(sizes)
        for (name, gradient), part, rest in zip(
            gradients.items(), mean.split(sizes), left, strict=True
        ):
            gradient.copy_(part.view_as(gradient))
            if rest is not None:
                self._pending[name] = rest.view_as(gradient).clone()

    def _factor(self, codec: PowerSGD, gradients: dict[str, Tensor], turn: Turn) -> None:
        feeds_back = self._feeds_back(codec)
        values = {n: self._due(n, g, feeds_back) for n, g in gradients.items()}
        for name, mean in codec.means(values, self.wire, turn).items():
            if feeds_back:
                self._pending[name] = values[name] - mean
            gradients[name].copy_(mean)

    def _due(self, name: str, gradient: Tensor, feeds_back: bool) -> Tensor:
        """The gradient, and what earlier steps left behind of it."""
        residual = self.residuals.get(name) if feeds_back else None
        return gradient.clone() if residual is None else gradient + residual.to(gradient)


def make_format(form: Form, seed: int) -> Format | PowerSGD:
    """What sends gradients in a form."""
    then = None if form.then is None else HALF[form.then]
    if form.name in HALF:
        return Cast(HALF[form.name])
    if form.name == "none":
        return Plain()
    if form.name == "topk":
        return Largest(form.number or 0.0, then)
    if form.name == "randomk":
        return Drawn(form.number or 0.0, seed, then)
    if form.name == "powersgd":
        return PowerSGD(int(form.number or 1), seed, then)
    made: Quantised = int8() if form.name == "int8" else signs()
    return made
