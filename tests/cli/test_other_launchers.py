"""The options of other launchers: taken where they mean the same, else answered by our command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.other_launchers import SAME, with_our_names
from paceline.config import load
from paceline.errors import ConfigError

DROPPED = "machines number themselves"
PLACE = "N: how many machines; on a single one leave both out"

# what was typed after `paceline train`, and after it the command to use, with what is to know of it
ANSWERS = {
    "c.yaml --num-gpus 4": "c.yaml --nproc 4",
    "--num_gpus=4 c.yaml": "--nproc 4 c.yaml",
    "c.yaml --gpus-per-node 8": "c.yaml --nproc 8",
    "c.yaml --devices 2": "c.yaml --nproc 2",
    "c.yaml -np 4": "c.yaml --nproc 4",
    "c.yaml --num_processes 4": "c.yaml --nproc 4",
    "c.yaml --num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip a "
    "--main_process_port 1": "c.yaml --nnodes 2 --rdzv a:1 --nproc 4 "
    f"({DROPPED}; --nproc is by machine)",
    "c.yaml --nnodes 2 --master-addr node0 --master-port 1234 --node-rank 0": "c.yaml --nnodes 2 "
    f"--rdzv node0:1234 ({DROPPED})",
    "c.yaml --nnodes=2 --master_addr=node0": "c.yaml --nnodes=2 --rdzv node0:29400",
    "c.yaml --master_port 1": f"c.yaml --rdzv HOST:1 --nnodes N ({PLACE})",
    "c.yaml --address 10.0.0.1": f"c.yaml --rdzv 10.0.0.1:29400 --nnodes N ({PLACE})",
    "c.yaml --nnodes 2 --rdzv-endpoint a:1 --rdzv-backend c10d --rdzv-id 7": "c.yaml --nnodes 2 "
    "--rdzv a:1 (there is one rendezvous; a rendezvous is for one run)",
    "--standalone --nproc-per-node 2 c.yaml": "--nproc 2 c.yaml (one machine needs no rendezvous)",
    "c.yaml --backend gloo": "c.yaml --set launch.device=cpu (on CPUs ranks talk over Gloo)",
    "c.yaml --backend nccl": "c.yaml --set launch.device=cuda (on GPUs ranks talk over NCCL)",
    "c.yaml --backend mpi": "c.yaml (ranks talk over NCCL on GPUs and over Gloo on CPUs)",
    "c.yaml --mixed_precision bf16": "c.yaml --set precision=bf16",
    "c.yaml --mixed_precision no": "c.yaml --set precision=fp32",
    "c.yaml --precision 16-mixed": "c.yaml --set precision=fp16",
    "--config_file c.yaml --multi_gpu": "c.yaml (all GPUs are used)",
    "c.yaml --cpu": "c.yaml --set launch.device=cpu",
    "c.yaml --deepspeed ds.json": "c.yaml --set deepspeed=ds.json",
    "c.yaml --deepspeed=ds.json": "c.yaml --set deepspeed=ds.json",
    "c.yaml --deepspeed_config ds.json": "c.yaml --set deepspeed=ds.json",
    "c.yaml --deepspeed": "c.yaml --layout zero=2",
    "c.yaml --strategy deepspeed_stage_3": "c.yaml --layout zero=3",
    "c.yaml --strategy fsdp": "c.yaml --layout zero=3",
    "c.yaml --strategy ddp": "c.yaml",
    "c.yaml --use_fsdp": "c.yaml --layout zero=3",
    "c.yaml -H a,b": "c.yaml --hosts a,b",
    "--num-gpus 2 s.py --lr 3 --backend x": "--nproc 2 --script s.py -- --lr 3 --backend x",
    "--script s.py --num-gpus 2 -- --backend x": "--script s.py --nproc 2 -- --backend x",
    "--script s.py --use_fsdp": "--script s.py (in a script: paceline.Engine(..., "
    "layout='zero=3'))",
    "--script s.py --deepspeed ds.json": "--script s.py (in a script: paceline.compat.deepspeed."
    "initialize(..., config='ds.json'); the script's own arguments stand after --)",
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_the_whole_command_to_use_instead(
    typed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("print(1)")
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *typed.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err.rstrip("\n")
    assert caught.value.code == 2
    assert said.endswith(f"of another launcher; here that is: paceline train {ANSWERS[typed]}")


def test_each_that_is_taken_is_ours() -> None:
    for theirs, ours in SAME.items():
        assert with_our_names([theirs, "2"]) == [ours, "2"]
        assert with_our_names([f"{theirs}=2", "--", theirs]) == [f"{ours}=2", "--", theirs]


# an override, and what the config says to it
KEYS = {
    "launch.devices=4": "'launch.nproc'? (like launch.nproc: 4; how many ranks on each machine)",
    "launch.backend=nccl": "'launch.device'? (like launch.device: cpu; cpu or cuda: ranks talk over Gloo on CPUs, over NCCL on GPUs)",
    "launch.nproc_per_node=4": "'launch.nproc'? (like launch.nproc: 4; how many ranks on each machine)",
    "launch.gpus=4": "'launch.nproc'? (like launch.nproc: 4; how many ranks on each machine)",
    "launch.num_nodes=2": "'launch.nnodes'? (like launch.nnodes: 2)",
    "launch.master_addr=a": "'launch.rdzv'? (like launch.rdzv: node0:29400; HOST:PORT)",
    "strategy=ddp": "'layout'? (like layout: zero=3; ddp: auto; fsdp: zero=3; deepspeed: zero=1, zero=2 or zero=3 for its stages)",
    "accelerator=gpu": "'launch.device'? (like launch.device: cpu; auto, cpu or cuda)",
    "devices=4": "'launch.nproc'? (like launch.nproc: 4; how many ranks on each machine)",
    "num_nodes=2": "'launch.nnodes'? (like launch.nnodes: 2)",
    "backend=gloo": "'launch.device'? (like launch.device: cpu; cpu or cuda: ranks talk over Gloo on CPUs, over NCCL on GPUs)",
    "fsdp=true": "'layout'? (like layout: zero=3)",
    "precision=bf16-mixed": "'bf16'?",
    "precision=16-mixed": "'fp16'?",
    "precision=32-true": "'fp32'?",
}


@pytest.mark.parametrize("override", KEYS)
def test_keys_of_other_configs(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    [problem] = caught.value.problems
    assert problem.endswith(f"did you mean {KEYS[override]}")
