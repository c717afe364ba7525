"""An elastic Horovod script while a machine joins and another is lost: two launchers here."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from node_cases import NODE_TIMEOUT, Cluster, wait_for

SCRIPT = """
import os, time
import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def report(*words):
    if hvd.rank() == 0:
        with open("progress", "a") as file:
            print(*words, file=file)


def is_slow():
    return hvd.allreduce(torch.tensor(float(os.path.exists("slow"))), op=hvd.Max, name="slow").item() > 0


@hvd.elastic.run
def train(state):
    report("world", hvd.size(), state.batch)
    while (slow := is_slow()) or state.batch % 10:
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.batch))
        state.optimizer.zero_grad()
        (state.model(data) - data.sum(1, keepdim=True)).square().mean().backward()
        state.optimizer.step()
        state.batch += 1
        report("batch", hvd.size(), state.batch)
        state.commit()
        time.sleep(0.05 * slow)
    if hvd.rank() == 0:
        torch.save((state.batch, state.model.state_dict()), "end.pt")


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
state.register_reset_callbacks([lambda: report("reset", hvd.size(), 0)])
train(state)
"""


def alone(batches: int) -> dict[str, torch.Tensor]:
    """The weights after so many batches, which are the same on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in range(batches):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch))
        optimizer.zero_grad()
        (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.waits
def test_a_machine_joins_and_is_lost(tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text(SCRIPT)
    progress = tmp_path / "progress"

    def lines(kind: str) -> list[tuple[int, int]]:
        """The sizes of worlds and the batches in lines of a kind."""
        words = [line.split() for line in progress.read_text().splitlines()]
        return [(int(size), int(batch)) for what, size, batch in words if what == kind]

    def trains_on(size: int) -> bool:
        """Whether the newest world has that size, and has done some batches."""
        assert cluster.launchers[0].process.poll() is None, "the first launcher has ended"
        done = lines("batch") if progress.exists() else []
        return len(done) > 3 and all(found == size for found, _ in done[-3:])

    with Cluster(tmp_path) as cluster:
        command = ["--script", "elastic.py", "--backend", "horovod", "--nproc", "1"]
        command += ["--nnodes", "1:2", "--rdzv", cluster.rdzv, "--run-dir", "run"]
        for key, value in {"node_timeout": NODE_TIMEOUT, "rejoin_timeout": 120}.items():
            command += ["--set", f"launch.{key}={value}"]
        try:
            first = cluster.start(arguments=command)
            wait_for(lambda: trains_on(1), "a world of one machine")
            second = cluster.start(arguments=command)
            wait_for(lambda: trains_on(2), "the second machine to join")
            second.send(signal.SIGKILL)
            wait_for(lambda: trains_on(1), "the first machine to go on alone")
            cluster.hurry()
            assert first.ends() == 0
        except AssertionError as error:
            raise AssertionError(f"{error}\n{cluster.outputs()}") from None
    worlds = lines("world")
    sizes = [size for size, _ in worlds]
    assert (sizes[0], sizes[-1], max(sizes)) == (1, 1, 2), worlds
    begun = [batch for _, batch in worlds]
    assert begun == sorted(begun)
    assert begun[0] == 0 < begun[1]
    assert len(lines("reset")) == len(worlds) - 1
    batches, weights = torch.load(tmp_path / "end.pt")
    assert batches >= begun[-1]
    for name, expected in alone(batches).items():
        torch.testing.assert_close(weights[name], expected)
