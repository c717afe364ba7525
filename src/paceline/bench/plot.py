"""Measurements as a picture: times and bus bandwidths over sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.bench.collectives import COLLECTIVES
from paceline.bench.comm_request import GROUPS
from paceline.bench.comm_result import CommResult
from paceline.errors import ConfigError, MissingExtra
from paceline.formatting import binary_size, byte_rate, short_time

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raise unless a picture can be drawn to ``path``."""
    if Path(path).suffix.lower() not in KINDS:
        raise ConfigError(f"--plot {path}: must be the name of a picture, ending {_either(KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib, which draws pictures,", "draw")


def write_plot(result: CommResult, path: str) -> None:
    """Draw a row for each group: seconds a call on the left, bus bandwidth on the right."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    kinds = [kind for kind in result.groups if _drawn(result, kind)]
    figure = Figure(figsize=(12, 1 + 4 * max(len(kinds), 1)), dpi=120)
    grid = figure.subplots(max(len(kinds), 1), 2, squeeze=False)
    for (left, right), kind in zip(grid, kinds, strict=False):
        for name in _drawn(result, kind):
            cells = result.of(kind, name)
            sizes = [cell.size for cell in cells]
            left.plot(sizes, [cell.median for cell in cells], marker="o", markersize=3)
            rates = [cell.bus_bandwidth for cell in cells]
            right.plot(sizes, rates, marker="o", markersize=3, label=name)
        for axes, what, words in (
            (left, "time of a call", short_time),
            (right, "bus bandwidth", byte_rate),
        ):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{what}, {GROUPS[kind]}", fontsize=10)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: binary_size(value)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, w=words: w(value)))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    setting = result.setting
    figure.suptitle(
        f"{', '.join(setting.machines)}: {sum(setting.ranks)} ranks, {setting.device}, "
        f"{setting.backend}, {setting.dtype}",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path)


def _drawn(result: CommResult, kind: str) -> list[str]:
    """The collectives that have sizes, and so a curve."""
    return [name for name in COLLECTIVES if any(cell.size for cell in result.of(kind, name))]


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
