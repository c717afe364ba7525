"""Pipeline schedules as text and pictures: a row for each rank, time running to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import Protocol

from paceline.errors import LayoutError, MissingExtra
from paceline.layout.pipeline_orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Timed,
)

_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
}
# One hue a kind of work; a rank's second, third … stage is drawn in a darker shade of it.
_MOST_DRAWN = 5_000
_HUES = {FORWARD: 212, BACKWARD: 145, INPUT_GRAD: 172, WEIGHT_GRAD: 40}


class _Schedule(Protocol):
    """What is drawn: a ``paceline.layout.pipeline_schedules.PipelineSchedule``."""

    @property
    def name(self) -> str: ...
    @property
    def pp(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def stages_per_rank(self) -> int: ...
    @property
    def ranks(self) -> Sequence[Sequence[Timed]]: ...
    @property
    def makespan(self) -> float: ...
    @property
    def bubbles(self) -> Sequence[float]: ...
    @property
    def bubble(self) -> float: ...
    @property
    def most_live(self) -> Sequence[int]: ...


def caption(schedule: _Schedule) -> str:
    """The schedule in a line: its sizes, its bubble and what its ranks hold."""
    live = schedule.most_live
    held = str(live[0]) if len(set(live)) == 1 else f"{min(live)}…{max(live)}"
    return (
        f"{schedule.name}: {schedule.pp} ranks × {schedule.stages_per_rank} "
        f"stage{'s' if schedule.stages_per_rank > 1 else ''}, "
        f"{schedule.microbatches} microbatches: bubble {schedule.bubble:.1%}, "
        f"at most {held} live a rank"
    )


def legend(schedule: _Schedule) -> str:
    """What the letters and numbers of ``draw_text`` stand for, in two lines."""
    kinds = ", ".join(f"{kind} = {_NAMES[kind]}" for kind in _kinds(schedule))
    return (
        f"{kinds}, ... = idle; 0F2 = stage 0, forward, microbatch 2\n"
        "bubble = share of the time that ranks idle; live = microbatches whose activations a rank "
        "holds"
    )


def draw_text(schedule: _Schedule, columns: int) -> str:
    """See ``PipelineSchedule.table``."""
    unit, exact = _unit(schedule, columns)
    width = max(len(str(t.action)) for rank in schedule.ranks for t in rank) + 1
    lines = [caption(schedule)]
    if not exact:
        lines.append(f"(a column is {unit:g} of {schedule.makespan:g}: times are rounded to it)")
    for index, rank in enumerate(schedule.ranks):
        cells = ["." * (width - 1) + " "] * round(schedule.makespan / unit)
        row = "".join(cells)
        for action, start, end in rank:
            first, past = round(start / unit) * width, round(end / unit) * width
            text = str(action).ljust(max(past - first - 1, 0), "-")[: max(past - first - 1, 0)]
            row = row[:first] + (text + " " if past > first else "") + row[past:]
        share = f"{schedule.bubbles[index]:6.1%} idle"
        lines.append(f"rank {index:<2} {row.rstrip().ljust(len(cells) * width)} {share}")
    return "\n".join(lines)


def _unit(schedule: _Schedule, columns: int) -> tuple[float, bool]:
    """How much time a column stands for, and whether every action begins and ends on one."""
    times = {
        Fraction(time).limit_denominator(1000)
        for rank in schedule.ranks
        for t in rank
        for time in (t.start, t.end)
    }
    bottom = math.lcm(*(time.denominator for time in times))
    top = math.gcd(*(int(time * bottom) for time in times))
    if top == 0:
        return 1.0, True
    unit = top / bottom
    if schedule.makespan / unit <= columns:
        return unit, True
    lengths = [t.end - t.start for rank in schedule.ranks for t in rank if t.end > t.start]
    return max(min(lengths), schedule.makespan / columns), False


def draw_svg(schedule: _Schedule) -> str:
    """See ``PipelineSchedule.svg``."""
    left, top, row, gap = 70, 46, 30, 6
    span = schedule.makespan or 1.0
    shortest = min(
        (t.end - t.start for r in schedule.ranks for t in r if t.end > t.start), default=1
    )
    scale = min(max(22 / shortest, 600 / span), 6000 / span)
    wide = left + span * scale + 90
    high = top + schedule.pp * (row + gap) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" '
        f'width="{wide:.0f}" height="{high}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(caption(schedule))}</title>",
        f'<rect width="{wide:.0f}" height="{high}" fill="#ffffff"/>',
        f'<text x="{left}" y="26" font-size="14" fill="#222222">{escape(caption(schedule))}</text>',
    ]
    for index, rank in enumerate(schedule.ranks):
        y = top + index * (row + gap)
        middle = y + row / 2 + 4
        parts += [
            f'<text x="10" y="{middle}" fill="#222222">rank {index}</text>',
            f'<rect x="{left}" y="{y}" width="{span * scale:.2f}" height="{row}" fill="#eeeeee"/>',
            f'<text x="{left + span * scale + 8:.2f}" y="{middle}" fill="#555555">'
            f"{schedule.bubbles[index]:.1%} idle</text>",
        ]
        for action, start, end in rank:
            x, length = left + start * scale, (end - start) * scale
            fill, ink = _colours(schedule, action)
            parts.append(
                f"<g><title>{action}: {_NAMES[action.kind]}, stage {action.stage}, microbatch "
                f"{action.microbatch}, {start:g} to {end:g}</title>"
                f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{row}" fill="{fill}" '
                'stroke="#ffffff"/>'
                f'<text x="{x + length / 2:.2f}" y="{middle}" fill="{ink}" text-anchor="middle">'
                f"{action.microbatch}</text></g>"
            )
    parts += _legend(schedule, left, top + schedule.pp * (row + gap) + 12)
    return "\n".join([*parts, "</svg>", ""])


def _legend(schedule: _Schedule, x: float, y: float) -> list[str]:
    parts = []
    for kind in _kinds(schedule):
        fill, _ = _colours(schedule, Action(0, kind, 0))
        parts += [
            f'<rect x="{x}" y="{y}" width="16" height="16" fill="{fill}"/>',
            f'<text x="{x + 22}" y="{y + 13}" fill="#222222">{_NAMES[kind]}</text>',
        ]
        x += 52 + 7 * len(_NAMES[kind])
    parts += [
        f'<rect x="{x}" y="{y}" width="16" height="16" fill="#eeeeee"/>',
        f'<text x="{x + 22}" y="{y + 13}" fill="#222222">idle'
        + ("; darker: a rank's later stages" if schedule.stages_per_rank > 1 else "")
        + "</text>",
    ]
    return parts


def _kinds(schedule: _Schedule) -> list[str]:
    used = {t.action.kind for rank in schedule.ranks for t in rank}
    return [kind for kind in _NAMES if kind in used]


def _colours(schedule: _Schedule, action: Action) -> tuple[str, str]:
    """The colour of an action and of the number on it."""
    chunk = action.stage // schedule.pp
    lightness = 72 - 34 * chunk / max(schedule.stages_per_rank - 1, 1)
    return _hex(
        _HUES[action.kind], 0.55, lightness / 100
    ), "#ffffff" if lightness < 55 else "#222222"


def _hex(hue: float, saturation: float, lightness: float) -> str:
    import colorsys

    rgb = colorsys.hls_to_rgb(hue / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def write_png(schedule: _Schedule, path: str | Path) -> None:
    """Write the schedule as a PNG picture; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise MissingExtra("matplotlib, which draws PNG pictures,", "draw") from None
    actions = max(len(rank) for rank in schedule.ranks)
    if schedule.pp * actions > _MOST_DRAWN:
        raise LayoutError(
            f"a PNG picture of {schedule.pp} ranks with {actions} actions each: too large; "
            f"{_MOST_DRAWN} actions in all are the most. Draw it as SVG."
        )
    figure = Figure(figsize=(min(max(8.0, 0.3 * actions), 60.0), 1.6 + 0.45 * schedule.pp), dpi=120)
    axes = figure.subplots()
    for index, rank in enumerate(schedule.ranks):
        axes.barh(index, schedule.makespan, color="#eeeeee", height=0.85)
        for action, start, end in rank:
            fill, ink = _colours(schedule, action)
            axes.barh(index, end - start, left=start, color=fill, edgecolor="white", height=0.85)
            middle = (start + end) / 2
            axes.text(middle, index, str(action.microbatch), color=ink, ha="center", va="center")
    axes.set_yticks(
        range(schedule.pp),
        [f"rank {i} ({share:.0%} idle)" for i, share in enumerate(schedule.bubbles)],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, schedule.makespan)
    axes.set_title(caption(schedule), fontsize=10)
    patches = [
        Patch(color=_colours(schedule, Action(0, kind, 0))[0], label=_NAMES[kind])
        for kind in _kinds(schedule)
    ]
    patches.append(Patch(color="#eeeeee", label="idle"))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, format="png")
