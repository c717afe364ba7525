"""Measurements as tables for people."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench.collectives import COLLECTIVES
from paceline.bench.comm_request import GROUPS, LONGEST
from paceline.bench.comm_result import CommResult, slow_links
from paceline.formatting import binary_size, byte_rate, plural, short_time
from paceline.track.console import SafeConsole

_BAR = 20
_COLUMNS_WITHOUT_BAR = 80
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def wide_console() -> Console:
    """The terminal; a file or a pipe has room for whole rows, unless ``COLUMNS`` says otherwise."""
    console = SafeConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _COLUMNS_WITHOUT_BAR + 2 * _BAR
    return console


def show(result: CommResult, console: Console) -> None:
    """Print everything: each group, the lines through it, the links, and what to paste."""
    setting = result.setting
    where = ", ".join(
        f"{name} ({plural(count, 'rank')})"
        for name, count in zip(setting.machines, setting.ranks, strict=True)
    )
    _line(
        console,
        f"{where}; {setting.device}, {setting.backend}, {setting.dtype}, torch {setting.torch}",
    )
    for kind in result.groups:
        _line(console)
        _line(console, f"{kind}: {GROUPS[kind]}")
        room = console.width - _COLUMNS_WITHOUT_BAR
        console.print(_cells(result, kind, min(max(room, 3), _BAR)))
    _show_fits(result, console)
    _show_links(result, console)
    for text in left_out(result):
        _line(console, text)


def left_out(result: CommResult) -> list[str]:
    """Sentences about what was not measured, and how to have it measured."""
    told = [
        f"left out: {one.collective} ({one.group}): {one.refused}"
        for one in result.left_out
        if one.refused
    ]
    slow = [one for one in result.left_out if one.expected is not None]
    for kind in result.groups:
        calls = [
            f"{one.collective} of {binary_size(one.size)} ({short_time(one.expected)})"
            for one in slow
            if one.group == kind and one.expected is not None
        ]
        if calls:
            told.append(f"left out ({kind}), as a call takes too long: {', '.join(calls)}")
    if slow:
        needed = max(one.expected or 0.0 for one in slow) / LONGEST
        told.append(f"--seconds {needed:.2g} would measure these as well")
    return told


def bar(share: float, width: int = _BAR) -> str:
    """``share`` of ``width`` columns, to an eighth of one; whatever is there at all is seen."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _cells(result: CommResult, kind: str, bar_width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("collective", no_wrap=True)
    for name in ("size", "median", "p10", "p90", "algorithm", "bus"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if len(result.groups[kind]) > 1:
        table.add_column("slowest on")
    cells = [cell for cell in result.cells if cell.group == kind]
    fastest = max((cell.bus_bandwidth for cell in cells), default=0.0)
    for name in COLLECTIVES:
        for cell in result.of(kind, name):
            moved = COLLECTIVES[name].moves_data
            slowest = max(cell.by_group.items(), key=lambda group: group[1])[0]
            table.add_row(
                name,
                binary_size(cell.size) if moved else "",
                short_time(cell.median),
                short_time(cell.p10),
                short_time(cell.p90),
                byte_rate(cell.algorithm_bandwidth) if moved else "",
                byte_rate(cell.bus_bandwidth) if moved else "",
                bar(cell.bus_bandwidth / fastest, bar_width) if moved and fastest else "",
                *([slowest] if len(cell.by_group) > 1 else []),
            )
    return table


def _show_fits(result: CommResult, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("time of a call, fitted", no_wrap=True)
    table.add_column("")
    for name in ("latency", "bandwidth", "off by up to"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in result.groups:
        for name in COLLECTIVES:
            line = result.line(kind, name)
            if line is not None:
                latency, rate = short_time(line.latency), byte_rate(line.bandwidth)
                table.add_row(name, kind, latency, f"+ size / {rate}", f"{line.off:.0%}")
    if table.row_count:
        _line(console)
        console.print(table)


def _show_links(result: CommResult, console: Console) -> None:
    if result.pairs:
        _line(console)
        _line(console, "from the machine of a row to that of a column, at a time; one way")
        console.print(_matrix(result))
    for one in result.inside:
        (a, b), slowest = one.slowest, byte_rate(one.slowest_bandwidth)
        more = "" if one.pairs == 1 else f"; the slowest pair, ranks {a} and {b}: {slowest}"
        _line(
            console,
            f"inside of {one.machine}: {byte_rate(one.bandwidth)}, {short_time(one.latency)}{more}",
        )
    for text in slow_links(result.pairs):
        console.print(Text(text, "bold yellow"))
    links = result.links()
    if len(links) == 2:  # a config takes both or none: with one kind there is nothing to decide
        _line(console)
        _line(console, "the links as a config takes them:")
        _line(console, "reduction:")
        _line(console, "  links:")
        for name, link in links.items():
            _line(console, f'    {name}: "{link}"')


def _matrix(result: CommResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    machines = result.setting.machines
    table.add_column("")
    for name in machines:
        table.add_column(name, justify="right", no_wrap=True)
    found = {}
    for pair in result.pairs:
        found[pair.first, pair.second] = (pair.forward, pair.latency)
        found[pair.second, pair.first] = (pair.backward, pair.latency)
    best = max(rate for rate, _ in found.values())
    for row in machines:
        cells = []
        for column in machines:
            rate, latency = found.get((row, column), (0.0, 0.0))
            style = "bold yellow" if 2 * rate < best else ""
            text = f"{byte_rate(rate)} {short_time(latency)}" if rate else "·"
            cells.append(Text(text, style if rate else "dim"))
        table.add_row(row, *cells)
    return table


def _line(console: Console, text: str = "") -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
