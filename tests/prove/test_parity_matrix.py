"""A sample of the parity matrix and of the random pairs, and the page that the whole wrote."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

import paceline
from paceline.layout.pipeline_schedules import SCHEDULES
from paceline.testing import RankPool

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from parity.columns import COLUMNS, subject  # noqa: E402
from parity.page import HEADING  # noqa: E402
from parity.pairs import random_pair  # noqa: E402
from parity.rows import GLOBAL_BATCH, Row, all_rows, alone, compositions  # noqa: E402

SAMPLE = {
    "GPT": [
        Row(dp=2, zero=3, tp=2, sequence=1, pp=2, schedule="1f1b"),
        Row(pp=2, schedule="dualpipev"),
    ],
    "MLP": [Row(tp=4), Row(dp=2, zero=1, pp=2, schedule="zbv")],
    "convnet": [Row(dp=2, zero=2, pp=2, schedule="gpipe")],
    "GPT-2": [Row(dp=2, zero=3), Row(tp=2, pp=2, schedule="1f1b")],
    "Llama": [Row(dp=2, tp=2)],
    "Qwen3": [Row(tp=2, sequence=1), Row(pp=2, schedule="interleaved-1f1b")],
    "BERT": [Row(dp=2, zero=1, pp=2, schedule="interleaved-zero-bubble")],
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_sample_of_the_matrix(column: str, rank_pool: RankPool) -> None:
    rows = SAMPLE[column]
    for blocks in sorted({row.blocks for row in rows}):
        report = paceline.verify(
            **subject(column, blocks),
            layouts=[row.case for row in rows if row.blocks == blocks],
            global_batch=GLOBAL_BATCH,
            clip_norm=0.1,
            steps=2,
            pool=rank_pool,
        )
        assert report.ok, str(report)
        assert max(row.difference for row in report.rows) <= 1e-9


def test_the_sample_has_every_axis_stage_and_schedule() -> None:
    rows = [row for own in SAMPLE.values() for row in own]
    assert {row.zero for row in rows} == {0, 1, 2, 3}
    assert {row.schedule for row in rows} == {"", *SCHEDULES}
    assert max(row.world for row in rows) == 8
    assert max(row.axes for row in rows) == 3


def test_the_rows_cover_every_pair() -> None:
    chosen = compositions()
    assert len(chosen) >= 40
    assert len(set(all_rows())) == len(alone()) + len(chosen)
    assert all(row.world <= 8 for row in chosen)
    assert {row.schedule for row in alone()} >= set(SCHEDULES)
    met = {pair for row in chosen for pair in itertools.combinations(enumerate(row), 2)}
    for zero, schedule in itertools.product(range(4), SCHEDULES):
        assert ((1, zero), (6, schedule)) in met
    for tp, pp in itertools.product((2, 4), (2, 4)):
        assert (tp * pp > 8) or ((3, tp), (5, pp)) in met


def test_the_page_has_every_cell_and_none_is_wrong() -> None:
    page, _, over_nccl = (ROOT / "docs" / "parity.md").read_text("utf-8").partition(HEADING)
    cell = re.compile(r"\de[-+]\d+|0e\+00|refused \[\d+\]\(#why-refused\)")
    for row in all_rows():
        (line,) = re.findall(rf"^\| `{re.escape(str(row))}` \|(.*)\|$", page, re.MULTILINE)
        cells = [text.strip() for text in line.split("|")]
        assert len(cells) == len(COLUMNS)
        assert all(cell.fullmatch(text) for text in cells), (str(row), cells)
        assert re.search(
            rf"^\| `{re.escape(str(row))}` \| GPT \| (\de-\d+|refused) \|$", over_nccl, re.MULTILINE
        )


@pytest.mark.parametrize("number", [1, 5, 8, 11, 12, 28])
def test_no_false_alarm_on_random_pairs(number: int, rank_pool: RankPool) -> None:
    pair = random_pair(number, hugging_face_too=False)
    report = paceline.verify(**pair.arguments, layouts=[pair.layout], pool=rank_pool)
    assert report.rows[0].outcome in ("same", "refused"), f"{pair}\n{report}"
