"""What ``bench wire`` is asked to try: checked before a rank is started. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.wire_result import LEAST_STEPS, PLAIN
from paceline.config import Config, check
from paceline.config.keys import flat
from paceline.config.parallelism import CompressSection
from paceline.errors import ConfigError, LayoutError, TrainingError
from paceline.layout import Layout
from paceline.options import Form, LocalSteps

DEFAULT_FORMATS = (
    PLAIN,
    *("fp16", "int8", "sign", "topk:0.01", "topk:0.01+fp16", "randomk:0.01"),
    *("powersgd:4", "powersgd:4+fp16", "local:10"),
)
_LOCAL = re.compile(r"local(:(?P<every>\d+))?(:(?P<method>[a-z]+))?")


@dataclass(frozen=True)
class WireChoice:
    """One format to try: a form of gradients, or how many ``local`` steps lie between meetings."""

    name: str
    local: int | None = None
    method: str | None = None

    @staticmethod
    def parse(text: str) -> WireChoice:
        """``topk:0.01``, ``local:10`` or ``local:10:average``; ``TrainingError`` for others."""
        found = _LOCAL.fullmatch(text)
        if found is None:
            return WireChoice(str(Form.parse(text)))
        if found["every"] is None:
            raise TrainingError(
                f"{text!r} needs its steps between two meetings, as in local:10 or local:10:average"
            )
        every, method = int(found["every"]), found["method"]
        LocalSteps(every, method or LocalSteps.method)  # type: ignore[arg-type]
        return WireChoice(text, every, method)

    @property
    def period(self) -> int:
        """After how many steps ranks have waited for each other."""
        return self.local or 1

    def apply(self, config: Config) -> Config:
        """``config`` with this format, from the first step on; else as the user has it."""
        compress, rounds = CompressSection(), config.local_steps.model_copy(update={"every": None})
        if self.local is not None:
            changed: dict[str, Any] = {"every": self.local, "start": 0}
            if self.method is not None:
                changed["method"] = self.method
            changed["fragments"] = min(rounds.fragments, self.local)
            changed["overlap"] = min(rounds.overlap, self.local - 1)
            rounds = rounds.model_copy(update=changed)
        elif self.name != PLAIN:
            compress = config.compress.model_copy(update={"format": self.name, "warmup_steps": 0})
        return config.model_copy(update={"compress": compress, "local_steps": rounds})

    def lines(self, config: Config) -> list[str]:
        """What to write into ``config`` to have it, as YAML."""
        from paceline.config import yaml_file

        if self.local is not None:
            rounds = self.apply(config).local_steps.model_dump(exclude_defaults=True)
            given = {"local_steps": {"every": rounds.pop("every"), **rounds}}
        else:
            section = config.compress if self.name != PLAIN else CompressSection()
            rest = section.model_dump(exclude_defaults=True, exclude={"format"})
            given = {"compress": {"format": self.name, **rest}}
        return yaml_file.write(given).splitlines()


@dataclass(frozen=True)
class WireRequest:
    """What every rank gets to know. ``refused`` has the reasons, by format."""

    config: Mapping[str, Any]
    formats: tuple[str, ...]
    steps: int
    seconds: float
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The request as text."""
        return json.dumps(
            {
                "config": self.config,
                "formats": self.formats,
                "steps": self.steps,
                "seconds": self.seconds,
                "refused": self.refused,
            }
        )

    @staticmethod
    def from_json(text: str) -> WireRequest:
        """A request from its text."""
        data = json.loads(text)
        return WireRequest(**{**data, "formats": tuple(data["formats"])})

    def asked(self) -> dict[str, str]:
        """By option or key, in a form to compare with what other machines were asked."""
        settings = {key: repr(value) for key, value in flat(self.config).items()}
        settings.pop("launch.rdzv", None)  # each machine may spell it in its own way
        options = {
            "--formats": ",".join(self.formats),
            "--steps": str(self.steps),
            "--seconds": f"{self.seconds:g}",
        }
        return settings | {f"paceline bench wire {name}": value for name, value in options.items()}


def read_wire_request(
    config: Config, *, formats: str | None, steps: int, seconds: float
) -> WireRequest:
    """A request from the command line and a resolved config; ConfigError with all its problems."""
    problems = world_problems(config)
    if steps < LEAST_STEPS:
        problems.append(
            f"--steps {steps}: must be {LEAST_STEPS} or more, to know what a step takes"
        )
    if not seconds > 0 or seconds == float("inf"):
        problems.append(f"--seconds {seconds:g}: must be a number of seconds above 0, like 300")
    wishes: dict[str, WireChoice] = {}
    for text in _default_names(config) if formats is None else _words(formats):
        try:
            wish = WireChoice.parse(text)
            wishes[wish.name] = wish
        except TrainingError as error:
            told = str(error).removeprefix("compress: ").rstrip(".")
            problems.append(f"--formats: {told}")
    if formats is not None and not _words(formats):
        problems.append(
            f"--formats {formats!r} names none: give some, like --formats fp16,int8,topk:0.01"
        )
    if problems:
        raise ConfigError(problems)
    # What the others are compared with comes first, asked for or not.
    wishes = {PLAIN: WireChoice(PLAIN)} | wishes
    refused = {name: why for name, wish in wishes.items() if (why := refusal(config, wish))}
    if PLAIN in refused:
        raise ConfigError(refused[PLAIN])
    return WireRequest(config.model_dump(mode="json"), tuple(wishes), steps, seconds, refused)


def world_problems(config: Config) -> list[str]:
    """Why there is nothing to try, with so many ranks."""
    try:
        layout = Layout.parse(config.layout)
    except LayoutError as error:
        return [str(error)]
    if layout.world_size == 1:
        return [
            "one rank: nothing is sent to another one, so there is nothing to try. Give --nproc 2 "
            "or more, or several machines with --nnodes and --rdzv"
        ]
    if layout.dp == 1:
        return [
            f"layout {str(layout)!r} has dp=1: formats are about gradients that travel between "
            "data-parallel ranks, and there are no others, so there is nothing to try. Use a "
            "layout with dp=2 or more"
        ]
    return []


def refusal(config: Config, wish: WireChoice) -> str:
    """Why this layout does not go with a format, as ``paceline train`` would say it; or nothing."""
    return "; ".join(check(wish.apply(config)))


def _default_names(config: Config) -> Sequence[str]:
    """The usual ones, and what the config has already."""
    names = list(DEFAULT_FORMATS)
    if config.local_steps.every is not None:
        names[-1] = f"local:{config.local_steps.every}"
    own = str(Form.parse(config.compress.format))
    return names if own in names else [*names, own]


def _words(text: str) -> list[str]:
    return [word.strip().lower() for word in text.split(",") if word.strip()]
