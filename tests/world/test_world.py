"""Joining and leaving a world, alone and among others."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatch, WorldError
from paceline.launch.environment import read_environment
from paceline.world import DEFAULT_TIMEOUT, World, collectives, joining, objects
from ports import free_port


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script of its own, as a user would."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_alone_without_a_launcher():
    with World.init() as world:
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert (world.node, world.nodes, world.restart_count) == (0, 1, 0)
        assert world.is_main
        assert world.backend == "none"
        assert world.everyone.ranks == (0,)
        assert World.current() is world
        assert not dist.is_initialized()
    assert not dist.is_initialized()


def test_current_joins_when_nobody_has():
    world = World.current()
    assert World.current() is world
    world.close()
    world.close()  # twice is once
    again = World.current()
    assert again is not world
    again.close()


@pytest.mark.world(1, 2, 4)
def test_the_place_of_every_rank(ranks, world_size):
    def job():
        world = World.current()
        world.close()
        with World.init(device="cpu") as world:
            assert repr(world).startswith(f"World(rank={world.rank}, size={world.size}")
            return world.info()

    for rank, info in enumerate(ranks(job)):
        assert info["rank"] == info["local_rank"] == rank
        assert info["size"] == info["local_size"] == world_size
        assert (info["node"], info["nodes"], info["restart_count"]) == (0, 1, 0)
        assert (info["device"], info["backend"]) == ("cpu", "gloo")
        assert info["timeout"] == DEFAULT_TIMEOUT
        assert info["host"] == socket.gethostname()
        assert info["torch"] == torch.__version__
        assert info["pid"] != os.getpid()


@pytest.mark.world(2)
def test_joining_again_returns_the_same_world_and_refuses_other_settings(ranks):
    def job():
        world = World.current()
        assert World.init() is world
        assert World.init(backend="gloo", device="cpu") is world
        assert World.init(timeout=world.timeout.total_seconds(), checks=True) is world
        messages = []
        for settings in ({"timeout": 5}, {"checks": False}, {"backend": "nccl"}):
            with pytest.raises(WorldError) as caught:
                World.init(**settings)
            messages.append(str(caught.value))
        return messages

    messages = ranks(job)[0]
    assert messages[0].startswith("World.init(timeout=5): this process has already joined a world")
    assert messages[1].startswith("World.init(checks=False): this process has already joined")
    assert messages[2].startswith("World.init(backend='nccl'): this process has already joined")


@pytest.mark.world(3)
def test_a_world_can_be_left_and_joined_many_times(ranks):
    def job():
        World.current().close()
        sums = []
        for _ in range(5):
            with World.init(device="cpu") as world:
                sums.append(collectives.all_reduce(torch.ones(1)).item())
                group = world.group([0, 2])
            with pytest.raises(WorldError, match="closed"):
                collectives.barrier(group)
            with pytest.raises(WorldError, match="closed"):
                world.group([0])
        assert not dist.is_initialized()
        return sums

    assert ranks(job) == [[3.0] * 5] * 3


@pytest.mark.world(2)
def test_a_process_group_of_someone_else_is_used_and_left_alone(ranks):
    def job():
        dist.init_process_group("gloo")
        # Processes that nobody has forked from one another have no key in common.
        objects._state["key"] = secrets.token_bytes(32)
        with World.init() as world:
            assert collectives.all_gather_object(world.rank) == [0, 1]
            assert world.backend == "gloo"
            assert (world.rank, world.size) == (dist.get_rank(), 2)
            total = collectives.all_reduce(torch.ones(1)).item()
            half = world.group([1])
            if half.contains(world.rank):
                collectives.barrier(half)
            collectives.barrier(timeout=5)
        assert dist.is_initialized()
        theirs = torch.ones(1)
        dist.all_reduce(theirs)
        with pytest.raises(WorldError, match="backend='nccl' but a process group with backend"):
            World.init(backend="nccl")
        dist.destroy_process_group()
        return total, theirs.item()

    assert ranks(job, join=False) == [(2.0, 2.0)] * 2


@pytest.mark.world(4)
def test_groups(ranks):
    def job():
        world = World.current()
        low, odd = world.group([1, 0]), world.group({1, 3})
        assert low.ranks == (0, 1)
        assert low.size == 2
        assert low.contains(1)
        assert 3 not in low
        assert world.group([0, 1]) is low
        assert world.group(range(4)) is world.everyone
        results = {}
        if low.contains(world.rank):
            results["low"] = collectives.all_reduce(torch.tensor([world.rank]), group=low).item()
        if odd.contains(world.rank):
            assert odd.rank == [1, 3].index(world.rank)
            # Roots are ranks of the world, in a group too.
            results["odd"] = collectives.broadcast_object(world.rank, src=3, group=odd)
            tensor = torch.tensor([world.rank])
            assert collectives.broadcast(tensor, src=3, group=odd).item() == 3
            assert [t.item() for t in collectives.all_gather(torch.tensor(world.rank), odd)] == [
                1,
                3,
            ]
            if world.rank == 1:
                collectives.send(torch.tensor([7]), dst=3, group=odd)
            else:
                assert collectives.recv(src=1, group=odd).item() == 7
        else:
            calls = (collectives.barrier, lambda group: collectives.all_gather_object(1, group))
            for call in calls:
                with pytest.raises(WorldError, match=r"rank \d is not in the group \[1, 3\]"):
                    call(odd)
            with pytest.raises(WorldError, match="is not in the group"):
                _ = odd.rank
        collectives.barrier()
        return results

    assert ranks(job) == [{"low": 1}, {"low": 1, "odd": 3}, {}, {"odd": 3}]


@pytest.mark.world(3)
def test_a_mismatch_in_a_group_concerns_its_members_alone(ranks):
    def job():
        world = World.current()
        pair = world.group([0, 2])
        if pair.contains(world.rank):
            with pytest.raises(CollectiveMismatch) as caught:
                collectives.all_reduce(torch.zeros(world.rank + 1), group=pair)
            text = str(caught.value)
        else:
            text = "not concerned"
        collectives.barrier()
        return text

    first, second, third = ranks(job)
    assert first == third
    assert "rank 0: all_reduce(sum) of float32 (1,)" in first
    assert "rank 2: all_reduce(sum) of float32 (3,)" in first
    assert second == "not concerned"


WRONG_GROUPS = [
    ([], "group([]): a group needs at least one rank."),
    ([0, 1], "group([0, 1]): 1 is not a rank of this world of 1: ranks are 0 to 0."),
    ([-1], "group([-1]): -1 is not a rank of this world of 1"),
    (["0"], "group(['0']): '0' is not a rank"),
    ([0, 0], "group([0, 0]): a rank is named more than once."),
    (0, "group(0): give a list of ranks, such as [0, 1]."),
]


@pytest.mark.parametrize(("wanted", "message"), WRONG_GROUPS)
def test_impossible_groups_are_refused(wanted, message):
    with World.init() as world, pytest.raises(WorldError) as caught:
        world.group(wanted)
    assert str(caught.value).startswith(message)


WRONG_SETTINGS = [
    ({"backend": "mpi"}, "backend='mpi' must be one of auto, gloo, nccl."),
    ({"backend": "nccl", "device": "cpu"}, "backend='nccl' needs a CUDA device"),
    ({"device": "gpu"}, "device='gpu' is not a device: use 'auto', 'cpu', 'cuda' or 'cuda:0'."),
    ({"share_gpu": True, "device": "cpu"}, "share_gpu=True lets ranks share GPUs, but this rank's"),
    ({"timeout": 0}, "timeout=0 must be a number of seconds above 0."),
    ({"timeout": "soon"}, "timeout='soon' must be a number of seconds above 0."),
    ({"timeout": float("nan")}, "timeout=nan must be a number of seconds above 0."),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SETTINGS)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(WorldError) as caught:
        World.init(**settings)
    assert str(caught.value).startswith(message)
    assert not dist.is_initialized()


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WorldError, match="device='cuda' but torch finds no CUDA device here"):
        World.init(device="cuda")


@pytest.fixture
def two_gpus(monkeypatch):
    """The fourth of four ranks, on a machine that looks as if it had two GPUs."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_ranks_than_gpus_is_refused(two_gpus):
    with pytest.raises(WorldError) as caught:
        World.init()
    assert str(caught.value).startswith(
        "4 ranks on this machine but only 2 GPU(s): each rank needs its own. Start 2 ranks or fewer"
    )


def test_ranks_share_gpus_when_told_to(two_gpus, monkeypatch):
    env = read_environment()
    device = joining.choose_device("cuda", "auto", env, share_gpu=True)
    assert device == joining.choose_device("auto", "nccl", env, share_gpu=True)
    assert device == torch.device("cuda", 1)  # local rank 3 of 2 GPUs
    joining.check_sharing(env, "nccl", device)
    with pytest.raises(WorldError, match="share_gpu=True is for NCCL, but backend='gloo'"):
        joining.check_sharing(env, "gloo", device)
    elsewhere = dataclasses.replace(env, nodes=2)
    with pytest.raises(WorldError, match="for tests on one machine, but this world has 2"):
        joining.check_sharing(elsewhere, "nccl", device)
    for name in ("NCCL_HOSTID", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "what the user had")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    joining.share_gpus()
    assert os.environ["NCCL_HOSTID"].endswith(str(os.getpid()))  # another in each process
    assert os.environ["NCCL_IB_DISABLE"] == "1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"  # what the user chose


def test_an_unreachable_meeting_place_is_named(monkeypatch):
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(WorldError) as caught:
        World.init(timeout=1, device="cpu")
    text = str(caught.value)
    assert text.startswith(f"rank 1 of 2 could not reach the store at 127.0.0.1:{port}")
    assert "within 1 s. Is rank 0 running" in text


def test_a_taken_port_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(WorldError) as caught:
            World.init(timeout=1, device="cpu")
    text = str(caught.value)
    assert text.startswith(f"rank 0 of 2 could not open the store at 127.0.0.1:{port}")
    assert "Is the port taken by another run" in text


@pytest.mark.world(2)
def test_ranks_that_never_come_are_named(ranks):
    def job():
        if os.environ["RANK"] == "1":
            return None
        os.environ["WORLD_SIZE"] = "4"
        os.environ["LOCAL_WORLD_SIZE"] = "4"
        with pytest.raises(WorldError) as caught:
            World.init(timeout=1, device="cpu")
        return str(caught.value)

    text = ranks(job, join=False)[0]
    assert "rank 0 waited 1 s at 127.0.0.1:" in text
    assert "for 4 ranks; missing: [1, 2, 3]." in text


@pytest.mark.world(2)
def test_a_rank_that_is_taken_is_refused(ranks):
    def job():
        with World.init(device="cpu") as world:
            if world.rank == 0:
                child = python("import paceline; paceline.World.init(timeout=60, device='cpu')")
                assert child.returncode == 1
                assert "RANK=0 has already joined at 127.0.0.1:" in child.stderr
            collectives.barrier(timeout=170)

    ranks(job, join=False)


@pytest.mark.world(2)
def test_ranks_that_join_with_different_settings_are_named(ranks):
    def job():
        with pytest.raises(WorldError) as caught:
            World.init(device="cpu", checks=os.environ["RANK"] == "0", timeout=60)
        return str(caught.value)

    for text in ranks(job, join=False):
        assert "with different checks: rank 0: True, rank 1: False." in text


@pytest.mark.world(2)
def test_a_barrier_may_be_more_patient_than_the_world(ranks, tmp_path):
    def job():
        import time

        # Both are up before they join: the world does not wait for long.
        (tmp_path / os.environ["RANK"]).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        with World.init(device="cpu", timeout=2) as world:
            if world.rank == 1:
                time.sleep(2.5)
            collectives.barrier(timeout=120)
            return collectives.all_reduce(torch.ones(1)).item()

    assert ranks(job, join=False) == [2, 2]


@pytest.mark.world(2)
def test_a_group_for_a_thread_of_its_own(ranks):
    def job() -> float:
        world = World.current()
        group = world.background_group("saving")
        assert group is world.background_group("saving")
        assert group not in (world.background_group("other"), dist.group.WORLD)
        value = torch.tensor([world.rank + 1.0])
        dist.all_reduce(value, group=group)
        return value.item()

    assert ranks(job) == [3.0, 3.0]


def test_a_world_by_hand_without_an_agent():
    """Plain processes with RANK, WORLD_SIZE and an address: rank 0 serves the store itself."""
    code = """
        import torch
        from paceline.world import World, collectives
        for _ in range(2):
            with World.init(timeout=120, device="cpu") as world:
                total = collectives.all_reduce(torch.tensor([world.rank + 1])).item()
        print(world.rank, total)
    """
    outputs = two_processes(textwrap.dedent(code))
    # Once in hundreds of times torch 2.13's Gloo aborts as the process ends, its work being done.
    if any(err == "terminate called without an active exception\n" for _, err in outputs):
        outputs = two_processes(textwrap.dedent(code))
    assert [out for out, _ in outputs] == ["0 3\n", "1 3\n"]
    assert [err for _, err in outputs] == ["", ""]


def two_processes(code: str) -> list[tuple[str, str]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [peer.communicate(timeout=240) for peer in peers]


def test_leaving_without_close_is_quiet():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = python(
        """
        import paceline
        world = paceline.World.init(device="cpu")
        assert world.backend == "gloo"
        """,
        **place,
        RANK="0",
        WORLD_SIZE="1",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.world(2)
def test_a_forked_child_may_look_but_not_close(ranks):
    def job():
        world = World.current()
        pid = os.fork()
        if pid == 0:
            same_place = World.current().rank == world.rank
            World.current().close()
            os._exit(0 if same_place else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return collectives.all_reduce(torch.ones(1)).item()

    assert ranks(job) == [2.0, 2.0]
