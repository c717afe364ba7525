"""What the doctor says of machines and folders, for one made-up fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doctor.made_up import GIB, cluster, machine, with_limits, with_machine
from paceline.doctor import checks_machine, checks_storage
from paceline.doctor.facts import (
    FolderFacts,
    FolderSighting,
    Gpu,
    Gpus,
    ModelSize,
    RunPlan,
    StartedBy,
    Versions,
)
from paceline.doctor.finding import problems

RUN_DIR = machine().folders[0]


def test_config_problems_are_findings_with_the_machines_that_have_them() -> None:
    plan = replace(machine().plan, problems=("train.steps=0: must be 1 or more",), source="a.yaml")
    [finding] = checks_machine.config(with_machine(1, plan=plan))
    assert finding.level == "failed"
    assert finding.found == "node1: train.steps=0: must be 1 or more"
    assert "paceline config check a.yaml" in finding.fix
    everywhere = cluster(machines=tuple(machine(number, plan=plan) for number in range(3)))
    [finding] = checks_machine.config(everywhere)
    assert finding.found == "train.steps=0: must be 1 or more"


@pytest.mark.parametrize(
    ("name", "level"),
    [("torch", "failed"), ("paceline", "failed"), ("config", "failed"), ("commit", "warning")],
)
def test_different_versions_are_named_with_their_machines(name: str, level: str) -> None:
    versions = replace(machine().versions, **{name: "other"})
    [finding] = checks_machine.versions(with_machine(2, versions=versions))
    assert finding.level == level
    assert "other on node2" in finding.found
    assert f"{getattr(machine().versions, name)} on node0, node1" in finding.found
    assert finding.fix


def test_patch_releases_of_python_may_differ() -> None:
    for python, level in (("3.11.9", "warning"), ("3.12.7", "failed")):
        versions = replace(machine().versions, python=python)
        [finding] = checks_machine.versions(with_machine(2, versions=versions))
        assert finding.level == level


def test_torch_that_cannot_be_imported_is_one_finding() -> None:
    versions = Versions("1.0", "", "3.11.7", config="c0ffee", commit="abc", torch_error="no torch")
    [finding] = checks_machine.versions(with_machine(0, versions=versions))
    assert finding.level == "failed"
    assert "node0: torch cannot be used: no torch" in finding.found


def test_the_launcher_is_named_with_its_variables() -> None:
    [first, *_] = checks_machine.launcher(cluster(1))
    assert first.found == "node0: none; a script that is started here runs alone"
    by = StartedBy("Open MPI", ("OMPI_COMM_WORLD_RANK",), "rank 1 of 2, which meet at a:1")
    [first, *_] = checks_machine.launcher(with_machine(0, started_by=by))
    assert first.found == "node0: Open MPI, by OMPI_COMM_WORLD_RANK: rank 1 of 2, which meet at a:1"
    [first, *_] = checks_machine.launcher(with_machine(0, started_by=StartedBy(problem="no size")))
    assert (first.level, first.found) == ("warning", "node0: no size")


def test_more_ranks_than_cores_and_too_many_threads() -> None:
    [finding] = problems(checks_machine.cores(with_limits(1, cores=1)))
    assert finding.found == "node1: 2 ranks on 1 core: they take turns"
    [finding] = problems(checks_machine.cores(with_limits(1, threads=8)))
    assert "OMP_NUM_THREADS=8 threads: 16 in all" in finding.found
    assert "export OMP_NUM_THREADS=4" in finding.fix
    assert problems(checks_machine.cores(with_limits(1, threads=4))) == []


def test_memory_that_cannot_hold_the_ranks() -> None:
    need = 2 * (300 * 2**20 + 16 * GIB)
    assert checks_machine.least_memory(machine()) == need
    assert problems(checks_machine.memory(with_limits(0, memory_free=need))) == []
    [finding] = problems(checks_machine.memory(with_limits(0, memory_free=need - 1)))
    assert finding.level == "failed"
    group = with_limits(0, memory_free=GIB, memory_group=2 * GIB)
    [finding] = problems(checks_machine.memory(group))
    assert "its control group may use 2 GiB" in finding.found
    assert "the container's or the job's limit" in finding.fix


def test_sharded_state_needs_less_memory() -> None:
    whole = machine()
    sharded = machine(plan=replace(whole.plan, copies_of_state=0.5))
    on_gpu = machine(plan=replace(whole.plan, on_gpu=True))
    assert checks_machine.least_memory(sharded) < checks_machine.least_memory(whole)
    assert checks_machine.least_memory(on_gpu) == 2 * checks_machine.GPU_RANK_BYTES


def test_open_files_by_soft_and_hard_limit() -> None:
    [finding] = problems(checks_machine.limits(with_limits(0, files=256)))
    assert finding.level == "failed"
    assert "ulimit -n 4096" in finding.fix
    [finding] = problems(checks_machine.limits(with_limits(0, files=256, files_hard=256)))
    assert "Raise the hard limit on node0" in finding.fix
    assert problems(checks_machine.limits(with_limits(0, files=None, files_hard=None))) == []


def test_processes_that_are_left() -> None:
    [finding] = problems(checks_machine.limits(with_limits(0, processes_used=9_999)))
    assert "node0: 1 more processes and threads are allowed (of 10000)" in finding.found


def test_shared_memory_for_copies_and_readers() -> None:
    plan = replace(machine().plan, in_memory=True)
    limits = replace(machine().limits, shm_free=15 * GIB)
    [finding] = problems(checks_machine.limits(with_machine(0, plan=plan, limits=limits)))
    assert finding.level == "failed"
    assert "need 16 GiB" in finding.found  # 2 slots for own and copied shares of 12 GiB over 3
    assert checks_machine.shared_state(machine(), 1) == 24 * GIB
    small = replace(machine().limits, shm_total=64 * 2**20, shm_free=64 * 2**20)
    readers = replace(machine().plan, workers=4)
    [finding] = problems(checks_machine.limits(with_machine(0, plan=readers, limits=small)))
    assert finding.level == "warning"
    assert "8 reading processes (data.workers) pass batches through it" in finding.found
    assert problems(checks_machine.limits(with_machine(0, limits=small))) == []


def gpus(*names: str, **changes: object) -> Gpus:
    devices = [Gpu(i, name, 80 * GIB, 79 * GIB) for i, name in enumerate(names)]
    if changes:
        devices[0] = replace(devices[0], **changes)  # type: ignore[arg-type]
    return Gpus(len(names), "550", tuple(devices))


def on_gpus(*each: Gpus) -> list[str]:
    plan = RunPlan(nproc=2, on_gpu=True)
    machines = tuple(machine(i, gpus=found, plan=plan) for i, found in enumerate(each))
    found = problems(checks_machine.gpus(cluster(len(each), machines=machines)))
    assert all(finding.fix for finding in found)
    return [f"{finding.level}: {finding.found}" for finding in found]


def test_gpus() -> None:
    good = gpus("H200", "H200")
    assert on_gpus(good, good) == []
    assert on_gpus(good, gpus("H200", "A100")) == [
        "warning: node0: 2 × H200; node1: 1 × H200, 1 × A100"
    ]
    [few] = on_gpus(gpus("H200"))
    assert few == "failed: node0: 2 ranks on 1 visible GPU"
    [busy] = on_gpus(gpus("H200", "H200", users=("4711 python (70.0 GiB)",), memory_free=9 * GIB))
    assert "9 GiB of 80 GiB free; in use: 4711 python (70.0 GiB)" in busy
    [broken] = on_gpus(gpus("H200", "H200", uncorrected_errors=3))
    assert broken == (
        "failed: node0: GPU 0 (H200): 3 uncorrected memory errors since the driver was loaded"
    )
    [hot] = on_gpus(gpus("H200", "H200", slowed_by="heat"))
    assert "its clocks are lowered by heat" in hot


def test_no_gpus_are_one_line() -> None:
    [finding] = checks_machine.gpus(cluster())
    assert (finding.level, finding.found) == ("ok", "none: ranks run on CPUs, over Gloo")


def test_gpus_that_torch_does_not_use() -> None:
    unused = replace(gpus("H200"), visible=0)
    [finding] = problems(checks_machine.gpus(cluster(1, machines=(machine(gpus=unused),))))
    assert "1 GPU present, none that torch would use" in finding.found


def test_folder_that_cannot_be_written_or_is_slow() -> None:
    broken = replace(RUN_DIR, error="Permission denied")
    [finding] = problems(checks_storage.folders(with_machine(1, folders=(broken,))))
    assert finding.level == "failed"
    assert "node1: track.run_dir /shared/runs cannot be written: Permission denied" in finding.found
    slow = replace(RUN_DIR, sync_seconds=4.0)
    [finding] = problems(checks_storage.folders(with_machine(1, folders=(slow,))))
    assert finding.level == "warning"
    assert "1.05 MB/s" in finding.found


def test_unshared_folder_matters_where_checkpoints_go() -> None:
    seen = (
        FolderSighting("track.run_dir", "node0", "node1", False),
        FolderSighting("track.run_dir", "node1", "node0", True),
    )
    [finding] = checks_storage.shared(cluster(2, seen=seen))
    assert finding.level == "failed"
    assert "node1 does not see what node0 wrote" in finding.found
    only_logs = replace(RUN_DIR, holds_checkpoints=False)
    machines = tuple(machine(number, folders=(only_logs,)) for number in range(2))
    [finding] = checks_storage.shared(cluster(2, seen=seen, machines=machines))
    assert finding.level == "warning"


def test_room_for_checkpoints() -> None:
    one = 12 * GIB

    def room(free: int | None, **changes: object) -> str:
        folder = replace(RUN_DIR, free=free)
        facts = cluster(1, machines=(machine(folders=(folder,), **changes),))
        [finding] = checks_storage.disk(facts)
        return finding.level

    assert room(3 * one) == "ok"
    assert room(3 * one - 1) == "warning"
    assert room(one - 1) == "failed"
    assert room(None) == "ok"  # an object store
    assert room(3 * one, model=ModelSize(error="needs a GPU")) == "warning"


def test_folders_without_checkpoints_need_no_room() -> None:
    logs = FolderFacts("track.run_dir", "/logs", free=0)
    assert checks_storage.disk(cluster(1, machines=(machine(folders=(logs,)),))) == []
