"""Shared memory is open to all: what another user put there is neither read nor removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from checkpoint.memory_cases import find_in_memory
from paceline import events
from paceline.checkpoint.memory.segment_files import (
    ROOT,
    folder_of,
    free_run,
    make_folder,
    segments,
)
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.rank_state import RankState, whole_part
from paceline.errors import CheckpointError

RUN = "run"
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /dev/shm is one: all may write to it, and nobody removes what is another's."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def snapshot_in(root: Path, number: float = 1.0) -> Path:
    """What a run that was killed leaves."""
    tier = MemorySnapshots(RUN, None, after=None, root=root)
    tier.snapshot(7, RankState({"w": whole_part(torch.full((3,), number))}))
    tier.close()
    return folder_of(RUN, root)


def given_to(user: int, folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, user)


def problems_of(root: Path) -> list[str]:
    said: list[str] = []
    assert find_in_memory(RUN, None, root=root, on_problem=said.append) is None
    return said


def test_ones_own_is_read(shared: Path) -> None:
    snapshot_in(shared)
    found = find_in_memory(RUN, None, root=shared)
    assert found is not None
    found.close()


@as_root
def test_a_folder_of_another_user_is_not_read(shared: Path) -> None:
    folder = snapshot_in(shared, 666.0)
    given_to(NOBODY, folder)
    (said,) = problems_of(shared)
    assert said.startswith(f"{folder} belongs to user {NOBODY}")
    assert "not to 0 (root): nothing in it is read" in said
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError, match=f"belongs to user {NOBODY}"):
        MemorySnapshots(RUN, None, after=None, root=shared)
    with pytest.raises(CheckpointError, match=f"belongs to user {NOBODY}"):
        free_run(RUN, shared)
    assert segments(shared) == []
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o750, 0o704])
def test_a_folder_that_others_can_get_into_is_not_read(shared: Path, mode: int) -> None:
    snapshot_in(shared).chmod(mode)
    (said,) = problems_of(shared)
    assert f"is open to others (mode {mode:04o})" in said


def test_a_link_is_not_followed(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "mine"
    snapshot_in(shared).rename(victim)
    folder_of(RUN, shared).symlink_to(victim)
    before = sorted(os.listdir(victim))
    (said,) = problems_of(shared)
    assert "is a link, which belongs to user" in said
    for action in (make_folder, free_run):
        with pytest.raises(CheckpointError, match="is a link"):
            action(RUN, shared)
    assert segments(shared) == []
    assert sorted(os.listdir(victim)) == before


@as_root
def test_a_file_of_another_user_is_not_read(shared: Path) -> None:
    folder = snapshot_in(shared)
    os.chown(folder / "rank-00000.own.0.bin", NOBODY, NOBODY)
    assert any(f"belongs to user {NOBODY}" in said for said in problems_of(shared))
    folder = snapshot_in(shared)
    header = folder / "rank-00000.own.0.json"
    header.rename(folder / "elsewhere")
    header.symlink_to(folder / "elsewhere")
    assert any(str(header) in said for said in problems_of(shared))


@as_root
def test_nobody_else_can_put_another_in_its_place(shared: Path) -> None:
    folder = snapshot_in(shared)
    for command in (["mv", folder, f"{folder}.old"], ["rm", "-rf", folder], ["ls", folder]):
        ended = subprocess.run([*map(str, command)], user=NOBODY, group=NOBODY, capture_output=True)
        assert ended.returncode != 0
    found = find_in_memory(RUN, None, root=shared)
    assert found is not None
    found.close()
    shared.chmod(0o777)  # without the sticky bit they could
    (said,) = problems_of(shared)
    assert "others could put something in its place" in said


@as_root
def test_a_name_taken_by_another_user_costs_the_snapshots_alone(shared: Path) -> None:
    folder = folder_of(RUN, shared)
    subprocess.run(["mkdir", str(folder)], user=NOBODY, check=True)
    subprocess.run(["touch", f"{folder}.fetched-0-x"], user=NOBODY, check=True)
    with pytest.raises(CheckpointError, match=f"belongs to user {NOBODY}"):
        MemorySnapshots(RUN, None, after=None, root=shared)


# ------------------------------------------------------------------ a run


def engine(number: float) -> paceline.Engine:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, number)
    return paceline.Engine(
        model, loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )


@pytest.fixture
def killed_run(tmp_path: Path) -> Iterator[Path]:
    """A run with a checkpoint of step 0 and a later, newer state in shared memory."""
    folder = tmp_path / "checkpoints"
    first = engine(1.0)
    checkpoints = paceline.Checkpoints(
        folder, first, options=paceline.Checkpointing(memory_every=1)
    )
    checkpoints.save(wait=True)
    first.step((torch.ones(4, 2), torch.zeros(4, 1)))
    checkpoints.snapshot()
    checkpoints.close(clean=False)
    assert folder_of(folder).is_dir()
    yield folder
    shutil.rmtree(folder_of(folder), ignore_errors=True)


def resumed(folder: Path, memory_every: int | None) -> tuple[int, list[str]]:
    seen: list[str] = []

    def report(event: events.Event) -> None:
        if isinstance(event, events.RestoreTried):
            seen.append(event.detail)

    options = paceline.Checkpointing(memory_every=memory_every)
    with paceline.Checkpoints(folder, engine(0.0), options=options, report=report) as checkpoints:
        restored = checkpoints.restore()
        assert restored is not None
        return restored.step, seen


def test_without_snapshots_of_its_own_a_run_reads_none(killed_run: Path) -> None:
    assert resumed(killed_run, None) == (0, [""])
    assert resumed(killed_run, 1)[0] == 1


@as_root
def test_a_resume_steps_over_what_another_user_planted(killed_run: Path) -> None:
    given_to(NOBODY, folder_of(killed_run))
    step, seen = resumed(killed_run, 1)
    assert step == 0
    assert f"belongs to user {NOBODY}" in seen[0]
    assert str(folder_of(killed_run, ROOT)) in seen[0]


def test_snapshots_given_up_do_not_come_back(killed_run: Path) -> None:
    """A run that went on without its memory has another history: what is in there is not its."""
    with paceline.Checkpoints(killed_run, engine(0.0)) as checkpoints:
        checkpoints.restore()
        checkpoints.save(wait=True)
    assert resumed(killed_run, 1)[0] == 0


def test_a_snapshot_that_would_never_be_read_is_refused(tmp_path: Path) -> None:
    with (
        paceline.Checkpoints(tmp_path, engine(0.0)) as checkpoints,
        pytest.raises(CheckpointError, match=r"Checkpointing\(memory_every=1\)"),
    ):
        checkpoints.snapshot()
