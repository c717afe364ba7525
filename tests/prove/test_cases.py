"""What a layout to prove may say, and which samples its ranks put through the model together."""

from __future__ import annotations

import pytest

from paceline.errors import LayoutError
from paceline.options import Pipelining
from paceline.prove import Case, LayoutResult


@pytest.mark.parametrize(
    "text",
    [
        "dp=2",
        "dp=2,microbatch=4",
        "dp=1,pp=2,schedule=zbv,microbatch=4",
        "dp=2,pp=2,schedule=interleaved-1f1b,stages=3",
        "dp=2,zero=3,tp=2,sequence=1",
    ],
)
def test_parsed_and_printed_back(text: str) -> None:
    assert str(Case.parse(text)) == text
    assert Case.parse(str(Case.parse(text))) == Case.parse(text)


WRONG = {
    "dp=2,schedule=zbv": "schedule is that of a pipeline, but pp=1",
    "dp=2,stages=2": "stages is that of a pipeline, but pp=1",
    "dp=2,sequence=1": "sequence is for tensor parallelism, but tp=1",
    "tp=2,sequence=yes": "must be sequence=0 or sequence=1",
    "pp=2,schedule=zvb": "Did you mean 'zbv'?",
    "pp=2,schedule=1f1b,schedule=zbv": "schedule is given twice",
    "pp=2,stages=0": "'stages=0' must be stages=<whole number, 1 or more>",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_makes_no_sense_is_told(text: str) -> None:
    with pytest.raises(LayoutError) as error:
        Case.parse(text)
    assert WRONG[text] in str(error.value)


def test_the_runs_own_settings_hold_where_a_case_says_nothing() -> None:
    own = Pipelining(schedule="gpipe", cuts=["blocks.1"], microbatches=3)
    assert Case.parse("pp=2", pipeline=own).pipelining() == own
    other = Case.parse("pp=2,schedule=zbv", pipeline=own).pipelining()
    assert (other.schedule, other.cuts) == ("zbv", ("blocks.1",))


def test_a_pipeline_cuts_into_the_microbatches_that_it_needs() -> None:
    """1f1b on four stages runs four at least; a share of three samples gives three, and a blank."""
    case = Case.parse("dp=2,pp=4")
    pieces = case.pieces(7)
    assert [len(own) for (rank, _), own in pieces.items() if rank == 0] == [1, 1, 1, 1]
    assert [len(own) for (rank, _), own in pieces.items() if rank == 1] == [1, 1, 1]
    assert case.microbatches(7) == [4, 4]
    assert case.forwards(7) == [[0, 4], [1, 5], [2, 6], [3]]
    assert case.accumulates(7)


def test_peers_read_the_same_samples() -> None:
    case = Case.parse("dp=2,tp=2,pp=2")
    readers = [case.data_rank(rank) for rank in range(8)]
    assert sorted(readers) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(case.pieces(5)) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_old_name_of_an_outcome_still_works_and_says_the_new_one() -> None:
    row = LayoutResult("dp=2", "same")
    with pytest.warns(DeprecationWarning, match="is called outcome now"):
        assert row.verdict == row.outcome == "same"
