"""TF_CONFIG from our launchers, and what is said of a script before ranks start. No TensorFlow."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.compat.tensorflow import cluster, library
from paceline.compat.tensorflow.script_check import check_script
from paceline.errors import MissingExtra, WorldError
from paceline.launch.environment import Environment

ALONE = Environment(
    rank=0, size=2, local_rank=0, local_size=2, node=0, nodes=1, address="127.0.0.1", port=1,
    restart_count=0, store_is_hosted=True,
)  # fmt: skip
ON_TWO = dataclasses.replace(ALONE, local_size=1, nodes=2)


@pytest.mark.world(3)
def test_ranks_agree_on_their_workers_and_a_new_world_has_new_ones(ranks):
    def job() -> list[str]:
        from paceline.compat.tensorflow import cluster
        from paceline.launch.environment import read_environment

        found = []
        env = read_environment()
        assert env is not None
        for restarts in (0, 1):
            os.environ["TF_CONFIG"] = ""
            cluster.join_cluster(dataclasses.replace(env, restart_count=restarts))
            found.append(os.environ["TF_CONFIG"])
        cluster.join_cluster(dataclasses.replace(env, restart_count=1))  # changes nothing
        assert os.environ["TF_CONFIG"] == found[-1]
        return found

    configs = [[json.loads(text) for text in one] for one in ranks(job, join=False)]
    for start in (0, 1):
        lists = [one[start]["cluster"] for one in configs]
        assert lists == [lists[0]] * 3
        assert len(set(lists[0]["worker"])) == 3
        assert all(w.startswith("127.0.0.1:") for w in lists[0]["worker"])
        assert [one[start]["task"] for one in configs] == [
            {"type": "worker", "index": rank} for rank in range(3)
        ]
    assert configs[0][0]["cluster"] != configs[0][1]["cluster"]


def test_a_port_is_kept_for_the_server_alone() -> None:
    port = cluster.take_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("", port)) as server:  # SO_REUSEADDR, as TensorFlow's own
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        assert server.getsockname()[1] == port


def test_one_rank_alone_is_a_cluster_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    env = dataclasses.replace(ALONE, size=1, local_size=1, address=None, port=None)
    [worker] = cluster.join_cluster(env)
    assert json.loads(os.environ["TF_CONFIG"])["cluster"] == {"worker": [worker]}


def test_the_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.own_address(ALONE) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert cluster.own_address(ON_TWO) == "127.0.0.1"  # what the user says counts
    with pytest.raises(
        WorldError, match=r"rank 0 is at 127.0.0.1:5, which means another machine on"
    ):
        cluster._check_reachable(ON_TWO, ["127.0.0.1:5", "10.0.0.2:5"])
    monkeypatch.setenv("PACELINE_TF_HOST", "fd00::1")
    assert cluster._bracketed(cluster.own_address(ON_TWO)) == "[fd00::1]"


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:x", "10.0.0.1:70000", 'a"b:1', ":5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(WorldError, match="it must be host:port"):
        cluster._checked(1, text)


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [("0,1,2,3", 0, "0,1"), ("0,1,2,3", 1, "2,3"), ("GPU-a,GPU-b", 1, "GPU-b"), ("-1", 1, "-1")],
)
def test_each_rank_has_gpus_of_its_own(
    visible: str, local_rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster.choose_gpus(dataclasses.replace(ALONE, rank=local_rank, local_rank=local_rank))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(WorldError) as refused:
        cluster.choose_gpus(ALONE)
    assert str(refused.value) == (
        "2 TensorFlow workers on this machine but only 1 GPU(s): each needs its own. Start 1 "
        "(--nproc 1), or train on the CPU with CUDA_VISIBLE_DEVICES=-1."
    )


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = importlib.util.find_spec
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in modules else found(name, *a)
    )


def test_the_command_needs_tensorflow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "tensorflow")
    with pytest.raises(MissingExtra, match=r"TensorFlow is not installed.*paceline.tensorflow."):
        cluster.prepare_rank()
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("")
    monkeypatch.setattr(
        sys, "argv", ["paceline", "train", "--script", "s.py", "--backend", "tensorflow"]
    )
    with pytest.raises(SystemExit):
        main()
    assert "pip install 'paceline[tensorflow]'" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("has_tf_keras", "given", "said"),
    [
        (True, None, "tf.keras is tf_keras here"),
        (False, None, "tf_keras is not installed"),
        (True, "0", ""),
    ],
)
def test_several_workers_train_with_tf_keras(
    has_tf_keras: bool,
    given: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv(library.LEGACY_KERAS, raising=False)
    if given is not None:
        monkeypatch.setenv(library.LEGACY_KERAS, given)
    for module in (library, cluster):
        monkeypatch.setattr(module, "is_installed", lambda name: has_tf_keras)
    cluster._choose_keras(ALONE)
    assert os.environ.get(library.LEGACY_KERAS) == (
        "1" if said.startswith("tf.keras is") else given
    )
    told = capsys.readouterr().err
    assert said in told
    assert bool(said) == bool(told)
    monkeypatch.delenv(library.LEGACY_KERAS, raising=False)


FITS = "strategy = tf.distribute.MultiWorkerMirroredStrategy()\nmodel.fit(x, y)\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import keras\n" + FITS, 1),
        ("import os\nfrom keras.layers import Dense\n" + FITS, 2),
        ("from tensorflow import keras\n" + FITS, None),
        ("import tf_keras as keras\n" + FITS, None),
        ("import keras\nmodel.fit(x, y)\n", None),
        ("import keras\nstrategy = MultiWorkerMirroredStrategy()\nstrategy.run(step)\n", None),
        ("import keras\nthis is no Python", None),
    ],
)
def test_keras_3_with_several_workers_is_seen_in_the_script(
    text: str, line: int | None, tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text(text)
    found = check_script(tmp_path / "s.py")
    if line is None:
        assert found is None
    else:
        assert found == (
            f"line {line} imports Keras 3: fit of Keras 3 cannot train under "
            "MultiWorkerMirroredStrategy; that of tf_keras can. Take Keras from TensorFlow (from "
            "tensorflow import keras), or import tf_keras as keras"
        )


def test_the_command_refuses_such_a_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").write_text("import keras\n" + FITS)
    command = ["paceline", "train", "--script", "s.py", "--backend", "tensorflow"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith(
        "--script s.py --backend tensorflow: line 1 imports Keras 3"
    )
