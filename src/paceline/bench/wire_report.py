"""The trials of ``bench wire`` as a table for people, and what to make of them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench.wire_advice import Advice, recommend
from paceline.bench.wire_request import WireChoice
from paceline.bench.wire_result import PLAIN, Trial, WireResult
from paceline.config import Config
from paceline.formatting import binary_size, plural, short_time, three_digits

_NOTHING = "·"


def show(result: WireResult, config: Config, console: Console) -> None:
    """Print everything: where, the trials, what was refused, and the recommendation."""
    setting = result.setting
    where = ", ".join(
        f"{name} ({plural(count, 'rank')})"
        for name, count in zip(setting.machines, setting.ranks, strict=True)
    )
    _line(
        console,
        f"{where}; {setting.device}, {setting.backend}, torch {setting.torch}; {setting.model}, "
        f"{setting.parameters:,} parameters, {setting.layout}",
    )
    _line(console)
    console.print(_table(result))
    for trial in result.trials:
        if trial.refused:
            _line(console, f"not tried: {trial.format}: {trial.refused}")
        elif trial.failed:
            _line(console, f"ended early: {trial.format}: {trial.failed}")
    if not result.complete:
        _line(console, "stopped before all formats were tried")
    _line(console)
    _show_advice(recommend(result.trials, result.steps, result.plain_again), config, console)


def _table(result: WireResult) -> Table:
    plain = result.of(PLAIN)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("format", no_wrap=True)
    for name in ("a step", "speed", "sent a step", "fewer"):
        table.add_column(name, justify="right", no_wrap=True)
    kind = result.setting.loss
    table.add_column(f"{kind} loss after {result.steps} steps", justify="right")
    if result.equal_seconds is not None:
        table.add_column(f"after {short_time(result.equal_seconds)}", justify="right")
        table.add_column("having made", justify="right")
    for trial in result.trials:
        if trial.step_seconds is not None:
            table.add_row(*_cells(trial, plain))
    if result.plain_again is not None:
        table.add_row("none, again", short_time(result.plain_again), style="dim")
    return table


def _cells(trial: Trial, plain: Trial | None) -> list[str]:
    assert trial.step_seconds is not None
    speed, fewer = _NOTHING, _NOTHING
    if plain is not None and plain.step_seconds is not None:
        speed = f"× {three_digits(plain.step_seconds / trial.step_seconds)}"
        if plain.sent_per_step and trial.sent_per_step:
            fewer = f"÷ {three_digits(plain.sent_per_step / trial.sent_per_step)}"
    by_time = trial.loss_at_time is not None
    return [
        trial.format,
        short_time(trial.step_seconds),
        speed,
        _NOTHING if trial.sent_per_step is None else binary_size(trial.sent_per_step),
        fewer,
        _loss(trial.loss_at_steps),
        _loss(trial.loss_at_time),
        f"{trial.steps_at_time} steps" if by_time else _NOTHING,
    ]


def _show_advice(advice: Advice | None, config: Config, console: Console) -> None:
    if advice is None:
        _line(console, "no recommendation: training without compression gave no loss to compare.")
        return
    title = f"recommended: {advice.format}" if advice.pays else f"recommended: {PLAIN} (plain)"
    console.print(Text(title, "bold"))
    _line(console, advice.reason)
    for remark in advice.remarks:
        _line(console, remark)
    wish = WireChoice.parse(advice.format)
    own = config.compress.options().formats is None and config.local_steps.every is None
    if wish.name == PLAIN and own:
        _line(console, "the config trains without compression already: nothing to change")
        return
    _line(console)
    _line(console, "for the config:")
    for line in lines_for(wish, config):
        _line(console, line)


def lines_for(wish: WireChoice, config: Config) -> list[str]:
    """What to write into ``config`` to have ``wish``, and nothing else of the kind."""
    lines = wish.lines(config)
    if wish.local is None and config.local_steps.every is not None:
        lines += ["local_steps:", "  every: null"]
    if wish.local is not None and config.compress.options().formats is not None:
        lines += ["compress:", "  format: none"]
    return lines


def _loss(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4g}"


def _line(console: Console, text: str = "") -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
