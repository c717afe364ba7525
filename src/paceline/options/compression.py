"""The format in which gradients are sent, and which of them are sent uncompressed."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from paceline.errors import TrainingError
from paceline.options.arguments import documented
from paceline.options.declare import Option, check

FORMATS = {
    "none": None,
    "fp16": None,
    "bf16": None,
    "int8": None,
    "sign": None,
    "topk": "ratio",
    "randomk": "ratio",
    "powersgd": "rank",
}
"""The formats, and what the number after the colon is."""

_LEAVES_BEHIND = ("sign", "topk", "randomk", "powersgd")
_WARMUP = 100
_THEN = ("fp16", "bf16")
_TAKES_THEN = ("topk", "randomk", "powersgd")
_TEXT = re.compile(r"(?P<name>[a-z0-9]+)(:(?P<number>[0-9.eE+-]*[0-9.]))?(\+(?P<then>[a-z0-9]+))?")
_EXAMPLES = "fp16, int8, topk:0.01 or powersgd:4+fp16"


@dataclass(frozen=True)
class Form:
    """A parsed format: ``topk:0.01+fp16`` is the name, the number and what its numbers become."""

    name: str
    number: float | None = None
    then: str | None = None

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read ``"powersgd:4+fp16"``; raises ``TrainingError`` that says what is wrong with it."""
        found = _TEXT.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if found is None:
            raise TrainingError(f"compress: {text!r} is not a format such as {_EXAMPLES}.")
        name, number, then = found["name"], found["number"], found["then"]
        if name not in FORMATS:
            within = "" if name == text.strip().lower() else f" (in {text!r})"
            raise TrainingError(
                f"compress: there is no format {name!r}{within}. There are {', '.join(FORMATS)}."
            )
        form = cls(name, None if number is None else _number(text, number), then)
        form._check(text)
        return form

    def _check(self, text: str) -> None:
        wants = FORMATS[self.name]
        if wants is None and self.number is not None:
            raise TrainingError(
                f"compress: {text!r}: {self.name} takes no number; write {self.name} alone."
            )
        example = f"{self.name}:{'4' if wants == 'rank' else '0.01'}"
        if wants is not None and self.number is None:
            raise TrainingError(f"compress: {text!r} needs its {wants}, as in {example}.")
        if wants == "ratio" and not 0 < (self.number or 0) <= 1:
            raise TrainingError(
                f"compress: {text!r}: the ratio of elements to send must be above 0 and at most 1, "
                f"as in {example}."
            )
        if wants == "rank" and (self.number is None or self.number < 1 or self.number % 1):
            raise TrainingError(
                f"compress: {text!r}: the rank must be a whole number, 1 or more, as in {example}."
            )
        if self.then is not None and self.name not in _TAKES_THEN:
            raise TrainingError(
                f"compress: {text!r}: only {', '.join(_TAKES_THEN)} are followed by another format."
            )
        if self.then is not None and self.then not in _THEN:
            raise TrainingError(
                f"compress: {text!r}: after + comes {' or '.join(_THEN)}, as in {example}+fp16."
            )

    def __str__(self) -> str:
        number = "" if self.number is None else f":{self.number:g}"
        return f"{self.name}{number}" + (f"+{self.then}" if self.then else "")


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise TrainingError(f"compress: {text!r}: {number!r} is not a number.") from None


@documented
@dataclass(frozen=True)
class Compression:
    """How data-parallel ranks send each other gradients; see docs/guides/compression.md."""

    config_section: ClassVar[str] = "compress"

    format: Annotated[
        str,
        Option(
            "none, fp16, bf16, int8 (a scale for each block), sign (one bit), topk:RATIO (the "
            "largest), randomk:RATIO (drawn anew each step) or powersgd:RANK; the last three "
            "may send their numbers in 16 bits: powersgd:4+fp16."
        ),
    ] = "none"
    error_feedback: Annotated[
        bool | None,
        Option(
            "Error feedback: add what compression left out to the next step's gradient. None: "
            "where the format needs it."
        ),
    ] = None
    warmup_steps: Annotated[
        int | None,
        Option(
            "Steps without compression at the start, while gradients are large and change fast. "
            "None: 100 for sign, topk, randomk and powersgd, else none.",
            ge=0,
        ),
    ] = None
    smallest: Annotated[
        int,
        Option(
            "Tensors with fewer elements, and vectors (norms, biases), are sent uncompressed.", ge=0
        ),
    ] = 1024
    embeddings: Annotated[
        bool,
        Option("Compress embeddings too. By default they are not: most of their gradient is zero."),
    ] = False
    rules: Annotated[
        Mapping[str, str],
        Option(
            "Other formats by name pattern, such as {'embedding.*': 'none'}. The first that "
            "matches counts.",
            must="a dict from name patterns to formats",
        ),
    ] = field(default_factory=dict)
    seed: Annotated[int, Option("The seed of what is random (randomk, powersgd).", ge=0)] = 0

    def __post_init__(self) -> None:
        Form.parse(self.format)
        check(self, "compress: ")
        for pattern, text in self.rules.items():
            try:
                Form.parse(text)
            except TrainingError as error:
                told = str(error).removeprefix("compress: ")
                raise TrainingError(f"compress: rule for {pattern!r}: {told}") from None

    @classmethod
    def of(cls, value: Compression | str) -> Compression:
        """A format's name alone stands for it with everything else as it is by default."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        raise TrainingError(
            f"compress={value!r} must be a format such as {_EXAMPLES}, or paceline.Compression(…)."
        )

    @property
    def formats(self) -> str | None:
        """All formats that it names but ``none``, for rules to look at; ``None``: no other."""
        named = [Form.parse(text) for text in (self.format, *self.rules.values())]
        return ", ".join(dict.fromkeys(str(f) for f in named if f.name != "none")) or None

    @property
    def warmup(self) -> int:
        """How many steps are without compression."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return _WARMUP if Form.parse(self.format).name in _LEAVES_BEHIND else 0

    def form_of(self, name: str, shape: tuple[int, ...], *, is_embedding: bool = False) -> Form:
        """The format in which the gradient of the parameter ``name`` is sent."""
        rule = self.rule_for(name)
        if rule is not None:
            return Form.parse(self.rules[rule])
        if self.left_alone_by(name, shape, is_embedding=is_embedding) is not None:
            return Form("none")
        return Form.parse(self.format)

    def rule_for(self, name: str) -> str | None:
        """The pattern of the rule that counts for the parameter ``name``, if there is one."""
        return next((p for p in self.rules if fnmatch.fnmatchcase(name, p)), None)

    def left_alone_by(
        self, name: str, shape: tuple[int, ...], *, is_embedding: bool = False
    ) -> str | None:
        """The option that would have the parameter ``name`` compressed, where it is not."""
        rule = self.rule_for(name)
        if rule is not None:
            return "rules" if Form.parse(self.rules[rule]).name == "none" else None
        if Form.parse(self.format).name == "none":
            return "format"
        if len(shape) < 2:  # vectors, whatever their size, unless a rule names them
            return "rules"
        if math.prod(shape) < self.smallest:
            return "smallest"
        return "embeddings" if is_embedding and not self.embeddings else None
