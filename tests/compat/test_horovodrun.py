"""``horovodrun``'s arguments, every one of them; and ``horovod.run``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.compat import horovod
from paceline.compat.horovod.alias import IMPORT_PATH
from paceline.compat.horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from paceline.compat.horovod.runner import run_commandline
from paceline.compat.horovod.runner.arguments import (
    SWITCHES,
    WITH_VALUE,
    is_horovodrun,
    read_horovodrun,
)
from paceline.compat.horovod.runner.util.threads import in_thread
from paceline.config import load
from paceline.errors import LaunchError

# what follows horovodrun, and what it is after `paceline train --backend horovod`
COMMANDS = {
    "-np 4 -H a:2,b:2 python train.py --lr 1": "--on ssh --hosts a:2,b:2 --script train.py -- "
    "--lr 1",
    "-np 3 -H a:2,b:2 python3 -u train.py": "--on ssh --hosts a:2,b:1 --script train.py",
    "-np 2 ./train.py": "--nproc 2 --script ./train.py",
    "-np 2 -H localhost:2 python train.py": "--nproc 2 --script train.py",
    "-np 1 -H localhost:2 python train.py": "--nproc 1 --script train.py",
    "--slots-per-host 2 python train.py": "--nproc 2 --script train.py",
    "-np 2 --cycle-time-ms 0.5 python train.py": "--set "
    "'launch.env.HOROVOD_CYCLE_TIME=\"0.5\"' --nproc 2 --script train.py",
    "-np 4 --hostfile hosts --gloo python train.py": "--on ssh --hostfile hosts --script train.py "
    "(ranks talk over NCCL on GPUs and over Gloo on CPUs; the file's slots must be 4 together)",
    "-np 2 --mpi -H a,b python train.py": "--on mpi --hosts a:1,b:1 --script train.py",
    "-np 2 -p 22 -i key python train.py": '--set \'launch.ssh.options=["Port=22", '
    '"IdentityFile=key"]\' --nproc 2 --script train.py',
    "-np 2 --timeline-filename t.json --fusion-threshold-mb 1 python train.py": "--set "
    "'launch.env.HOROVOD_TIMELINE=\"t.json\"' --set "
    "'launch.env.HOROVOD_FUSION_THRESHOLD=\"1048576\"' --nproc 2 --script train.py",
    "-np 2 --output-filename logs --reset-limit 2 python train.py": "--run-dir logs "
    "--max-restarts 2 --nproc 2 --script train.py",
    "--min-np 2 --max-np 4 -np 2 python train.py": "--max-restarts 3 --nproc 2 --script train.py "
    "(machines come and go as a whole: where they do, start the command on each of them with "
    "--nnodes LEAST:MOST --rdzv HOST:PORT)",
}

REFUSED = {
    "-np 2 --host-discovery-script d.sh python train.py": "machines that come start the command",
    "-np 2 --config-file c.yaml python train.py": "give what is set in it as options",
    "-np 5 -H a:2,b:2 python train.py": "-np 5: the hosts have 4 slots together",
    "-np 2 --jsrun python train.py": "start it with --on mpi",
    "-np 2 -cb python train.py": "paceline doctor",
    "-np 2 python -m package.train": "name the file of the module with --script",
    "-np 2 --nothing python train.py": "--nothing: no option of horovodrun",
    "-np": "-np: needs a value",
    "-np two python train.py": "-np two: must be a whole number, 1 or more",
    "-np 2 --cycle-time-ms": "--cycle-time-ms: needs a value",
    "-np 2 --cycle-time-ms=x python train.py": "--cycle-time-ms x: must be a number",
    "-np 2 --fusion-threshold-mb -1 python train.py": "--fusion-threshold-mb -1: must be a number",
    "-np 2 -H a:x python train.py": "-H a:x: 'a:x' must be NAME:SLOTS",
    "-np 2 -H a,,b python train.py": "-H a,,b: '' must be NAME:SLOTS",
    "-np 3 -H localhost:2 python train.py": "-np 3: the hosts have 2 slots together",
    "-np 3 --slots-per-host 2 python train.py": "-np 3: the hosts have 2 slots together",
    "--slots-per-host x python train.py": "--slots-per-host x: must be a whole number",
    "-np 2 bash -c true": "bash: no file; ranks run a Python script",
    "-np 2 python": "no script: name it at the end",
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_answered_with_the_whole_command(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *typed.split()])
    if not typed.endswith("./train.py"):
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr().err.strip()
    else:
        said = read_horovodrun(typed.split()).answer()
    words = f"of horovodrun; here that is: paceline train --backend horovod {COMMANDS[typed]}"
    assert said.endswith(words), said


# whose options they are, where several launchers have a name
@pytest.mark.parametrize(
    ("typed", "theirs"),
    [
        ("-np 2 python train.py", True),
        ("-np 2 --timeline-filename t.json train.py", True),
        ("--config-file c.yaml --cycle-time-ms 1 train.py", True),
        ("--config-file c.yaml --num-processes 2 train.py", False),
        ("--config-file c.yaml train.py", False),
        ("--num_processes 2 python train.py", False),
        ("-np 2 --master-port 1 train.py", False),
        ("config.yaml --log-level info", False),
        ("--reset-limit 2 config.yaml", False),
        ("--script train.py --log-level info", False),
        ("-np 2 train.py --log-level info", False),
        ("", False),
    ],
)
def test_told_from_other_launchers(typed: str, theirs: bool) -> None:
    assert is_horovodrun(typed.split()) is theirs


@pytest.mark.parametrize("typed", REFUSED)
def test_refused_by_name(typed: str) -> None:
    assert REFUSED[typed] in read_horovodrun(typed.split()).answer()


def test_every_option_is_used_noted_or_refused() -> None:
    for name in WITH_VALUE:
        command = read_horovodrun([name, "2", "python", "train.py"])
        assert any((command.refused, command.notes, len(command.arguments) > 2)), name
        overrides = [w for w in command.arguments if re.match(r"launch\.\w+[.=]", w)]
        load(None, overrides)  # keys that there are, with values that they take
    for name in SWITCHES:
        command = read_horovodrun(["-np", "2", name, "python", "train.py"])
        assert any((command.refused, command.notes, len(command.arguments) > 4)), name


def test_run_returns_what_every_rank_returned() -> None:
    def work(start: int, *, factor: int) -> tuple[int, int, float]:
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
        return start + factor * hvd.rank(), hvd.size(), total

    assert horovod.run(work, (10,), {"factor": 2}, np=2) == [(10, 2, 1.0), (12, 2, 1.0)]
    with pytest.raises(LaunchError, match="on this machine alone"):
        horovod.run(work, (1,), hosts="a:2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nprocs'"):
        horovod.run(work, nprocs=2)
    with pytest.raises(ValueError, match="only allow one set True"):
        horovod.run(work, use_gloo=True, use_mpi=True)


@pytest.mark.parametrize("module", ["horovod", "paceline.compat.horovod"])
def test_the_module_runs_a_command_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nimport torch\nimport horovod.torch as hvd\nhvd.init()\n"
        "total = hvd.allreduce(torch.ones(1), op=hvd.Sum)\n"
        "print(f'rank {hvd.rank()} of {hvd.size()}: {total.item()} {sys.argv[1:]}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", f"{module}.runner.launch", "-np", "2", "python", "train.py", "--x"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: 2.0 ['--x']" in done.stdout
    assert "is not used" not in done.stderr  # our own folder is no installed Horovod


def test_help_and_refusals_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    run_commandline(["--help"])
    assert "-np N" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no script: name it at the end"):
        run_commandline([])


def test_loaders_read_ahead() -> None:
    class Numbers(BaseDataLoader):
        def __len__(self) -> int:
            return 3

        def _iterate(self) -> Iterator[Any]:
            yield from range(3)

    class Ahead(AsyncDataLoaderMixin, Numbers):
        def _process_batch(self, batch: Any) -> Any:
            return batch * 2

    class Broken(AsyncDataLoaderMixin, Numbers):
        def _iterate(self) -> Iterator[Any]:
            yield 1
            raise OSError("the disk is gone")

    for size in (0, 1, 8):
        loader = Ahead(async_loader_queue_size=size)
        assert [list(loader), list(loader)] == [[0, 2, 4], [0, 2, 4]]
        iterator = iter(loader)
        next(iterator)
        loader.close_async_loader()
    with pytest.raises(OSError, match="the disk is gone"):
        list(Broken())


def test_threads_are_started() -> None:
    seen: list[int] = []
    in_thread(seen.append, (3,)).join()
    in_thread(lambda: 1 // 0, silent=True).join()
    assert seen == [3]
    with pytest.raises(ValueError, match="for one: "):
        in_thread(seen.append, 3)  # type: ignore[arg-type]
