"""Split over ranks, a model computes what it computes whole: losses, gradients, three Adam steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.models.gpt import GPT
from paceline.parallel.blocks import find_blocks
from paceline.parallel.tensor import (
    apply_plan,
    full_tensor,
    local_of,
    make_plan,
    mixing,
    plain,
)
from parallel import tensor_cases as cases

OWN = ["gpt tied", "gpt untied", "mlp", "convnet", "encoder", "vision"]
HUGGING_FACE = ["gpt2", "llama eager", "qwen3", "bert", "mixtral"]


@pytest.mark.world(2)
@pytest.mark.parametrize("names", [OWN, HUGGING_FACE])
def test_two_ranks_train_as_one_process_does(ranks, names):
    def job():
        return {name: cases.worst_after_three_steps(name) for name in names}

    for found in ranks(job, timeout=170):
        assert {name: at for name, at in found.items() if at[0] > 1e-9} == {}


@pytest.mark.world(4)
def test_four_ranks_train_as_one_process_does(ranks):
    def job():
        names = ["gpt tied", "llama-2kv", "llama-2kv eager"]
        return {name: cases.worst_after_three_steps(name) for name in names}

    for found in ranks(job, timeout=170):
        assert {name: at for name, at in found.items() if at[0] > 1e-9} == {}


@pytest.mark.world(2)
def test_sequence_parallel_changes_no_number(ranks):
    def job():
        names = ["gpt untied", "qwen2"]
        return {name: cases.worst_after_three_steps(name, sequence=True) for name in names}

    for found in ranks(job, timeout=170):
        assert {name: at for name, at in found.items() if at[0] > 1e-9} == {}


@pytest.mark.world(2)
def test_sequence_parallel_keeps_part_of_the_sequence_between_layers(ranks):
    def job():
        mesh = cases.tp_mesh()
        model = GPT(vocab_size=64, context=9, layers=1, heads=2, width=8).double()
        tokens = torch.arange(18).view(2, 9)
        plan = make_plan(model, 2, sample=lambda m: m(tokens), sequence=True)
        whole = model(tokens)
        apply_plan(model, plan, mesh)
        seen = []
        model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with mixing(mesh):
            y = plain(model(tokens))
        # Nine positions do not divide by two: one rank holds one more.
        return tuple(seen[0].to_local().shape), cases.relative(y, whole)

    found = ranks(job)
    assert [shape for shape, _ in found] == [(2, 5, 8), (2, 4, 8)]
    assert max(difference for _, difference in found) < 1e-12


@pytest.mark.world(2)
def test_gradients_of_whole_parameters_are_equal_to_the_bit_on_all_ranks(ranks):
    def job(sequence):
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("gpt tied")
        batch = batches()
        plan = make_plan(model, 2, sample=lambda m: loss(m, batch), sequence=sequence)
        apply_plan(model, plan, mesh)
        with mixing(mesh):
            loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                assert isinstance(parameter.grad, DTensor), name
                assert parameter.grad.placements == parameter.placements, name
                continue
            assert type(parameter.grad) is torch.Tensor, name
            gathered = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(gathered, parameter.grad)
            assert torch.equal(*gathered), name

    ranks(job, False)
    ranks(job, True)


@pytest.mark.world(4)
def test_split_and_sharded_trains_as_one_process_does(ranks):
    def job():
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("copies", "shards", "tp"))
        whole, batches, loss = cases.case("gpt tied")
        split = copy.deepcopy(whole)
        apply_plan(split, make_plan(split, 2, sample=lambda m: loss(m, batches())), mesh["tp"])
        for name in find_blocks(split):
            fully_shard(split.get_submodule(name), mesh=mesh["copies", "shards"])
        fully_shard(split, mesh=mesh["copies", "shards"])
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (whole, split)]
        worst = 0.0
        for _ in range(3):
            both = [batches(), batches()]
            (sum(loss(whole, batch) for batch in both) / 2).backward()
            with mixing(mesh["tp"]):
                loss(split, both[mesh["shards"].get_local_rank()]).backward()
            for optimizer in optimizers:
                optimizer.step()
            for a, b in zip(whole.parameters(), split.parameters(), strict=True):
                worst = max(worst, cases.relative(full_tensor(b), a))
                worst = max(worst, cases.relative(full_tensor(b.grad), a.grad))
                state = full_tensor(optimizers[1].state[b]["exp_avg"])
                worst = max(worst, cases.relative(state, optimizers[0].state[a]["exp_avg"]))
                assert torch.equal(local_of(full_tensor(b), b), b.to_local())
            for optimizer in optimizers:
                optimizer.zero_grad()
        return worst

    assert max(ranks(job, timeout=120)) < 1e-9


@pytest.mark.world(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(ranks, reentrant):
    def job():
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("gpt tied")
        batch = batches()
        apply_plan(model, make_plan(model, 2, sample=lambda m: loss(m, batch)), mesh)
        for block in model.blocks:
            block.attention.dropout = 0.5

        def gradients():
            model.zero_grad()
            torch.manual_seed(1)
            with mixing(mesh):
                total = loss(model, batch)
                total.backward()
            return [full_tensor(p.grad) for p in model.parameters()]

        expected = gradients()
        for block in model.blocks:
            inner = block.forward

            def forward(x, inner=inner):
                def again(x):
                    with mixing(mesh):  # recomputation runs wherever backward runs
                        return inner(x)

                return checkpoint(again, x, use_reentrant=reentrant)

            block.forward = forward
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))

    ranks(job)
