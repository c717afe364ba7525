"""``launch.ray`` and ``launch.mpi``: what is refused before anything starts, and what is planned."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config import Config, load
from paceline.errors import ConfigError
from paceline.launch.engines import ClusterJob, engine_named
from paceline.launch.engines.mpi_command import Mpi, find_mpi, host_command

KINDS = [kind for kind in ("openmpi", "mpich") if shutil.which(f"mpirun.{kind}")]
HOSTILE = [
    "'",
    '"',
    "\n",
    "$(id)",
    "`id`",
    "../",
    "-",
    "--",
    ":",
    ";",
    "|",
    "&",
    "\\",
    " ",
    "é",
    "\x1b",
]


def config(*overrides: str) -> Config:
    return load(None, list(overrides))


def problems(engine: str, *overrides: str) -> str:
    return "\n".join(engine_named(engine).problems(config(f"launch.on={engine}", *overrides)))


def job(folder: Path, *overrides: str, arguments: tuple[str, ...] = ()) -> ClusterJob:
    return ClusterJob(
        config=config(*overrides),
        train=("--script", str(folder / "train.py")),
        run=folder / "run",
        folder=folder,
        script_arguments=arguments,
    )


def mpirun_saying(folder: Path, text: str) -> str:
    """A program that says this when it is asked for its version."""
    program = folder / f"mpirun{len(os.listdir(folder))}"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_which_mpirun_it_is(tmp_path: Path) -> None:
    for text, dialect in (
        ("mpirun (Open MPI) 4.1.4", "openmpi"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "openmpi"),
        ("mpirun (Open MPI) 5.0.3", "openmpi"),
        ("HYDRA build details:\n    Version:  4.0.2", "hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", "intel"),
    ):
        assert find_mpi(mpirun_saying(tmp_path, text)).dialect == dialect
    with pytest.raises(ConfigError, match="not the mpirun of Open MPI"):
        find_mpi(mpirun_saying(tmp_path, "slurm 23.02"))
    with pytest.raises(ConfigError, match="there is no such program here"):
        find_mpi("no-such-mpirun")
    for hostile in ("-x", "--help", "a\nb"):
        with pytest.raises(ConfigError, match="is no name of a program"):
            find_mpi(hostile)


def test_command_lines_of_mpirun() -> None:
    words = Mpi("mpirun", "openmpi").words(["a", "b"], 2, "/home", ["NCCL_DEBUG"])
    assert words[words.index("-H") + 1] == "a:1,b:1"
    placed = ["--map-by", "ppr:1:node", "--bind-to", "none"]
    assert words[words.index("--map-by") :][:4] == placed
    assert words[-2:] == ["-x", "NCCL_DEBUG"]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    words = Mpi("mpirun", "hydra").words(["a", "b"], 2, "/home", ["NCCL_DEBUG"])
    assert words == [
        *("mpirun", "-genvall", "-hosts", "a,b", "-n", "2", "-ppn", "1"),
        *("-bind-to", "none", "-wdir", "/home"),
    ]
    words = Mpi("mpirun", "intel").words([], 1, "/home", [])
    assert "-hosts" not in words
    assert words[words.index("-genv") :][:3] == ["-genv", "I_MPI_PIN", "0"]


@pytest.mark.skipif(not KINDS, reason="no mpirun here: install openmpi-bin or mpich")
def test_what_mpi_cannot_do(tmp_path: Path) -> None:
    one = f"launch.mpi.mpirun=mpirun.{KINDS[0]}"
    hosts = "launch.mpi.hosts=[node0, node1]"
    assert problems("mpi", one) == ""
    assert problems("mpi", one, hosts) == ""
    assert "mpirun ends a job that loses a host" in problems("mpi", one, "launch.nnodes='1:2'")
    assert "but 2 hosts are named" in problems("mpi", one, hosts, "launch.nnodes=3")
    assert "without hosts" in problems("mpi", one, "launch.nnodes=2")
    assert "the hosts have 4 slots each" in problems(
        "mpi", one, "launch.mpi.hosts=['a:4', 'b:4']", "launch.nproc=2"
    )
    assert "ssh's own config" in problems("mpi", one, "launch.mpi.hosts=[me@node0]")
    assert "leave one of them out" in problems("mpi", one, hosts, "launch.mpi.hostfile=hosts")
    assert "cannot be a word for mpirun" in problems("mpi", one, "launch.mpi.args=[':']")
    assert "there is no such program" in problems("mpi", "launch.mpi.mpirun=nothing-like-it")
    implied = engine_named("mpi").implied(config("launch.mpi.hosts=['a:4', 'b:4']"))
    assert implied == {"launch.nnodes": "2", "launch.nproc": "4"}
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    file = config(f"launch.mpi.hostfile={tmp_path}/hosts", "launch.nnodes=2", "launch.nproc=2", one)
    plan = engine_named("mpi").plan(
        ClusterJob(file, ("my.yaml",), tmp_path / "run", Path("/home/me"))
    )
    assert "--rdzv a:29400 --nnodes 2" in plan


@pytest.mark.skipif(not KINDS, reason="no mpirun here: install openmpi-bin or mpich")
def test_the_slots_of_hosts_are_the_ranks_of_each_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--on",
        "mpi",
        "--hosts",
        "a:2,b:2",
        "--dry-run",
        "--set",
        f"launch.mpi.mpirun=mpirun.{KINDS[0]}",
    ]
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *words])
    with contextlib.suppress(SystemExit):
        main()
    launcher = capsys.readouterr().out.strip().splitlines()[-1]
    assert "launch.nproc=2" in launcher
    assert launcher.endswith("--rdzv a:29400 --nnodes 2")


def hostile_values(count: int) -> list[str]:
    chosen = random.Random(0)
    return ["".join(chosen.choices(HOSTILE, k=chosen.randint(1, 5))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_words_reach_the_launcher_as_they_are(kind: str, tmp_path: Path) -> None:
    """Through a real mpirun, which takes a lone colon for another program."""
    marker = tmp_path / "another-program-ran"
    values = [":", "touch", str(marker), *hostile_values(5_000)]
    launcher = job(tmp_path, arguments=tuple(values)).launcher()
    [python, *_, word] = host_command(launcher)
    prints = "import json, sys; print(json.dumps(json.loads(sys.argv[1])))"
    mpirun = find_mpi(f"mpirun.{kind}").words([], 1, str(tmp_path), [])
    done = subprocess.run(
        [*mpirun, python, "-S", "-c", prints, word], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == launcher[3:]
    assert not marker.exists()


def test_hostile_hosts_are_refused() -> None:
    if not KINDS:
        pytest.skip("no mpirun here")
    one = f"launch.mpi.mpirun=mpirun.{KINDS[0]}"
    for value in ("-oProxyCommand=id", "a b", "a;b", "$(id)", "a\nb", "../a", "", ":", "a:b"):
        assert problems("mpi", one, f"launch.mpi.hosts={json.dumps([value])}"), value


def test_what_ray_cannot_do(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert problems("ray", "launch.nproc=2") == ""
    assert problems("ray", "launch.nproc=2", "launch.nnodes='1:2'") == ""
    assert "has no place for 3" in problems(
        "ray", "launch.nproc=2", "launch.nnodes='1:2'", "layout=tp=2"
    )
    assert "name the one number" in problems(
        "ray", "launch.nproc=2", "launch.nnodes='1:2'", "launch.shrink=wait"
    )
    assert "launch.rdzv" in problems("ray", "launch.rdzv=node0:1")
    assert "share_gpu" in problems("ray", "launch.share_gpu=true")
    assert "no such folder" in problems("ray", f"launch.ray.working_dir={tmp_path}/none")
    for name in ("CPU", "GPU", "", "a\nb"):
        said = problems("ray", f"launch.ray.resources={json.dumps({name: 1.0})}")
        assert "is no name of a resource" in said
    assert "above 0" in problems("ray", "launch.ray.resources={special: -1}")
    assert "no address has" in problems("ray", 'launch.ray.address="ray://a\\nb"')


def test_plan_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from paceline.launch.engines.ray_trainer import scaling

    chosen = job(
        tmp_path,
        *("launch.nproc=2", "launch.nnodes='1:3'", "launch.ray.cpus_per_worker=4"),
        *("launch.ray.placement=SPREAD", "launch.ray.resources={tpu_host: 1}"),
    )
    scaled = scaling(chosen.config, use_gpu=True)
    assert scaled.num_workers == (2, 6)
    assert scaled.resources_per_worker == {"CPU": 4.0, "GPU": 1.0, "tpu_host": 1.0}
    assert scaled.placement_strategy == "SPREAD"
    plan = engine_named("ray").plan(chosen)
    assert "num_workers          (2, 6)" in plan
    assert "max_failures         0" in plan, "a script is not run twice unasked"


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'paceline[ray]'" in problems("ray", "launch.nproc=2")


def test_trainer_from_python(tmp_path: Path) -> None:
    """It is Ray's own, with what the config says; nothing is started before ``fit``."""
    pytest.importorskip("ray")
    import paceline.ray

    run = tmp_path / "runs" / "first"
    sets = ["launch.max_restarts=2", "launch.ray.cpus_per_worker=0.5", "launch.env={A: b}"]
    trainer = paceline.ray.trainer(run_dir=run, num_workers=3, overrides=sets)
    assert trainer.scaling_config.num_workers == 3
    assert trainer.scaling_config.resources_per_worker == {"CPU": 0.5}
    assert trainer.run_config.storage_path == str(run.parent)
    assert trainer.run_config.name == "first"
    assert trainer.run_config.failure_config.max_failures == 2
    assert trainer.run_config.worker_runtime_env["env_vars"]["A"] == "b"
    saved = load(run / "config.yaml")
    assert (saved.launch.nproc, saved.layout) == (3, "dp=3")
    again = paceline.ray.trainer(run_dir=run, num_workers=2, overrides=["layout=dp=2"])
    assert again.train_loop_config["run"] == str(run)
