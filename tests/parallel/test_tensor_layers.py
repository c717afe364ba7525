"""The parts: layers as plain modules, packed weights, attention, dropout, precision."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import paceline
from paceline.errors import LayoutError
from paceline.parallel.dtensor import held_runs, is_first_copy
from paceline.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitForms,
    TensorPlan,
    apply_plan,
    full_tensor,
    local_of,
    make_plan,
    mixing,
    plain,
    split_forms,
)
from paceline.parallel.tensor.shards import cut, placement, wrap
from parallel import tensor_cases as cases


@pytest.mark.world(2)
def test_parallel_linears_compute_what_linears_do(ranks):
    def job():
        mesh = cases.tp_mesh()
        torch.manual_seed(0)
        up, down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
        columns = ColumnParallelLinear.from_linear(up, mesh)
        rows = RowParallelLinear.from_linear(down, mesh)
        x = torch.randn(3, 6, dtype=torch.float64)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        expected, got = down(up(a)), rows(columns(b))
        assert type(got) is torch.Tensor
        (expected**2).sum().backward()
        (got**2).sum().backward()
        assert cases.relative(got.detach(), expected.detach()) < 1e-12
        assert cases.relative(b.grad, a.grad) < 1e-12
        assert cases.relative(full_tensor(columns.weight.grad), up.weight.grad) < 1e-12
        assert cases.relative(full_tensor(rows.weight.grad), down.weight.grad) < 1e-12
        # The bias is added once, and its gradient is the whole one on every rank.
        assert cases.relative(rows.bias.grad, down.bias.grad) < 1e-12

        # The same over a group, or over so many neighbours.
        world = paceline.World.current()
        for over in (world.group([0, 1]), 2):
            again = RowParallelLinear.from_linear(down, over)
            assert torch.equal(again(ColumnParallelLinear.from_linear(up, over)(x)), got)
            assert again.weight.device_mesh.size() == 2
        assert ColumnParallelLinear(6, 8, 1).weight.to_local().shape == (8, 6)
        for wrong in (3, 0, True, "tp"):
            with pytest.raises(LayoutError, match="pass a mesh, a Group, or a number that divides"):
                ColumnParallelLinear(6, 8, wrong)

        gathering = ColumnParallelLinear.from_linear(up, mesh, gather_output=True)
        assert cases.relative(gathering(x), up(x)) < 1e-12
        own = RowParallelLinear.from_linear(down, mesh, input_is_parallel=True)
        part = up(x).chunk(2, -1)[mesh.get_local_rank()]
        assert cases.relative(own(part), down(up(x))) < 1e-12
        torch.manual_seed(1)
        fresh = ColumnParallelLinear(6, 7, mesh, bias=False)
        torch.manual_seed(1)
        assert torch.equal(full_tensor(fresh.weight), nn.Linear(6, 7, bias=False).weight)
        assert tuple(fresh.weight.to_local().shape) == ((4, 6), (3, 6))[mesh.get_local_rank()]

    ranks(job)


@pytest.mark.world(2)
def test_packed_tensors_are_cut_and_put_together_in_their_own_order(ranks):
    def job():
        mesh = cases.tp_mesh()
        rank = mesh.get_local_rank()
        full = torch.arange(24.0).view(12, 2)
        for dim, chunks in [(0, 1), (0, 3), (0, 2), (1, 1)]:
            local = cut(full, mesh, dim, chunks)
            expected = [chunk.chunk(2, dim)[rank] for chunk in full.chunk(chunks, dim)]
            assert torch.equal(local, torch.cat(expected, dim))
            split = wrap(local, mesh, placement(dim, chunks), full.shape)
            assert torch.equal(full_tensor(split), full)
            assert torch.equal(plain(split), full)
            # torch's own reading of its private placement; 2.11 takes one of FSDP's alone.
            if torch.__version__ >= (2, 13):
                assert torch.equal(split.full_tensor(), full)
            assert torch.equal(local_of(full * 2, split), local * 2)
        uneven = wrap(cut(full[:5], mesh, 0), mesh, Shard(0), full[:5].shape)
        assert torch.equal(full_tensor(uneven), full[:5])
        assert torch.equal(local_of(full[:5], uneven), uneven.to_local())

    ranks(job)


class Attend(nn.Module):
    """Fused attention with whatever options."""

    def __init__(self, heads, kv_heads, **options):
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = (nn.Linear(16, 16 // heads * kv_heads) for _ in range(2))
        self.bias = nn.Parameter(torch.linspace(-1, 1, heads * 25).view(heads, 5, 5))

    def forward(self, x):
        def apart(y, heads):
            return y.view(*x.shape[:2], heads, -1).transpose(1, 2)

        options = dict(self.options)
        if "attn_mask" in options:
            options["attn_mask"] = options["attn_mask"](self.bias)
        q = apart(self.q(x), self.heads)
        k, v = apart(self.k(x), self.kv_heads), apart(self.v(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, **options)
        return self.o(y.transpose(1, 2).flatten(2))


ATTENTION = [
    (4, 4, dict(is_causal=True, scale=0.3)),
    (4, 2, dict(is_causal=True, enable_gqa=True)),
    (4, 1, dict(enable_gqa=True)),  # one head of keys cannot be split: shared by all
    (4, 4, dict(attn_mask=lambda bias: bias)),
    (4, 4, dict(attn_mask=lambda bias: bias[:1])),
    (4, 4, dict(attn_mask=lambda bias: torch.ones(5, 5, dtype=torch.bool).tril())),
    (4, 4, dict(attn_mask=lambda bias: bias.mean(0)[None, None].expand(3, 1, 5, 5))),
]


@pytest.mark.world(2)
def test_fused_attention_with_masks_and_shared_heads(ranks):
    def job():
        mesh = cases.tp_mesh()
        for heads, kv_heads, options in ATTENTION:
            torch.manual_seed(0)
            whole = Attend(heads, kv_heads, **options).double()
            split = copy.deepcopy(whole)
            kv = "column" if kv_heads % 2 == 0 else "replicate"
            roles = {"q": "column", "k": kv, "v": kv, "o": "row"}
            apply_plan(split, TensorPlan(2, roles), mesh)
            x = torch.randn(3, 5, 16, dtype=torch.float64)
            expected = whole(x)
            with mixing(mesh):
                got = split(x)
            (expected**2).sum().backward()
            (got**2).sum().backward()
            assert cases.relative(got.detach(), expected.detach()) < 1e-12
            for (name, a), b in zip(whole.named_parameters(), split.parameters(), strict=True):
                if a.grad is not None and float(a.grad.norm()) > 1e-12:
                    assert cases.relative(full_tensor(b.grad), a.grad) < 1e-12, (name, options)

    ranks(job)


@pytest.mark.world(2)
def test_dropout_draws_apart_on_split_values_and_alike_elsewhere(ranks):
    def job():
        mesh = cases.tp_mesh()
        ones = torch.ones(4, 64)
        split = wrap(cut(ones, mesh, 1), mesh, Shard(1), ones.shape)
        torch.manual_seed(0)
        with mixing(mesh):
            dropped = plain(F.dropout(split, 0.5))
            elsewhere = F.dropout(ones, 0.5)
        return dropped, elsewhere

    (dropped, elsewhere), (other_dropped, other_elsewhere) = ranks(job)
    assert torch.equal(dropped, other_dropped)
    assert torch.equal(elsewhere, other_elsewhere)
    assert not torch.equal(*dropped.chunk(2, 1))
    assert 0.3 < float((dropped == 0).double().mean()) < 0.7


@pytest.mark.world(2)
def test_frozen_and_tied_parameters_stay_so_and_meta_ones_are_cut(ranks):
    def job():
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("gpt tied")
        model.blocks[0].mlp.up.weight.requires_grad_(False)
        batch = batches()
        plan = make_plan(model, 2, sample=lambda m: loss(m, batch))
        on_meta = copy.deepcopy(model).to("meta")
        on_meta.head.weight = on_meta.tokens.weight
        for each in (model, on_meta):
            apply_plan(each, plan, mesh)
            assert each.head.weight is each.tokens.weight
            assert not each.blocks[0].mlp.up.weight.requires_grad
            assert tuple(each.blocks[0].mlp.up.weight.to_local().shape) == (64, 32)
            assert each.blocks[0].mlp.up.weight.shape == (128, 32)
        assert on_meta.blocks[0].mlp.up.weight.to_local().is_meta
        assert isinstance(model.tokens.weight, DTensor)
        with mixing(mesh):
            loss(model, batch).backward()
        assert model.blocks[0].mlp.up.weight.grad is None

    ranks(job)


@pytest.mark.world(2)
def test_a_part_of_a_model_takes_its_part_of_the_plan(ranks):
    def job():
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("gpt untied")
        plan = make_plan(model, 2, sample=lambda m: loss(m, batches()))
        del model.blocks[1]
        model.head = nn.Identity()
        apply_plan(model, plan, mesh)
        assert isinstance(model.blocks[0].mlp.up.weight, DTensor)

    ranks(job)


@pytest.mark.world(2)
def test_plans_that_split_more_or_less_than_they_should_are_slow_but_right(ranks):
    def job():
        mesh = cases.tp_mesh()
        whole, batches, loss = cases.case("vision")
        batch = batches()
        expected = loss(whole, batch)
        for user in (
            {"*.gate_up": "column", "*.qkv": "packed:3", "*.query": "column"},
            {"*.down": "row", "*.proj": "row", "head": "gather", "*.key": "gather"},
            {"*.gate_up": "packed:4", "*.qkv": "column", "*.value": "packed:2"},
        ):
            split = copy.deepcopy(whole)
            apply_plan(split, make_plan(split, 2, user=user), mesh)
            with mixing(mesh):
                got = plain(loss(split, batch))
            assert cases.relative(got.detach(), expected.detach()) < 1e-12, user
            got.backward()
            whole.zero_grad()
            loss(whole, batch).backward()
            for a, b in zip(whole.parameters(), split.parameters(), strict=True):
                if float(a.grad.norm()) > 1e-12:
                    assert cases.relative(plain(full_tensor(plain(b.grad))), a.grad) < 1e-9, user

    ranks(job, timeout=60)


@pytest.mark.world(2)
def test_autocast_and_evaluation(ranks):
    def job():
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("gpt tied")
        model.float()
        batch = batches()
        expected = loss(model, batch)
        apply_plan(model, make_plan(model, 2, sample=lambda m: loss(m, batch)), mesh)
        with torch.autocast("cpu", torch.bfloat16), mixing(mesh):
            got = loss(model, batch)
        got.backward()
        assert got.dtype == torch.float32
        assert abs(float(got / expected) - 1) < 0.05
        model.eval()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, mixing(mesh):
                assert abs(float(loss(model, batch) / expected) - 1) < 1e-5

    ranks(job)


@pytest.mark.world(2)
def test_a_mesh_that_is_not_the_plans_is_refused(ranks):
    def job():
        with pytest.raises(LayoutError, match="the plan is for tp=4"):
            apply_plan(nn.Linear(4, 4), TensorPlan(4, {}), cases.tp_mesh())

    ranks(job)


class InPlace(nn.Module):
    """Changes what it gets from its layers, as many models do to save memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8, 64)

    def forward(self, index):
        x = self.table(index)
        x *= 2
        y = self.down(self.act(self.up(x)))
        y += x
        y[:, 0] = 0.0
        return self.head(y).mul_(0.5)


@pytest.mark.world(2)
def test_a_model_may_change_outputs_in_place(ranks):
    def job():
        mesh = cases.tp_mesh()
        torch.manual_seed(0)
        whole = InPlace().double()
        split = copy.deepcopy(whole)
        index = torch.arange(12).view(3, 4)

        def loss(model):
            return F.cross_entropy(model(index).flatten(0, 1), index.flatten())

        plan = make_plan(split, 2, sample=loss)
        assert list(plan.roles.values()) == ["vocabulary", "column", "row", "vocabulary"]
        apply_plan(split, plan, mesh)
        loss(whole).backward()
        with mixing(mesh):
            loss(split).backward()
        for a, b in zip(whole.parameters(), split.parameters(), strict=True):
            assert cases.relative(full_tensor(b.grad), a.grad) < 1e-12

    ranks(job)


@pytest.mark.world(2)
def test_ranks_decide_together_and_an_error_stays_on_its_rank(ranks):
    def job():
        mesh = cases.tp_mesh()
        forms = SplitForms()
        x = wrap(torch.ones(4, 2), mesh, Shard(1), torch.Size((4, 4)))
        own = split_forms._try if dist.get_rank() == 0 else lambda *_: "not here"
        with mixing(mesh, forms), mock.patch.object(split_forms, "_try", own):
            y = torch.exp(x)
        whole = (type(y), list(forms.whole))
        # An index that is wrong on one rank: no gathers that the other would have to join.
        index = torch.tensor([0, 3 + dist.get_rank()])
        with mixing(mesh, SplitForms()):
            try:
                return whole, tuple(x.index_select(0, index).shape)
            except IndexError:
                return whole, "raised"

    found = ranks(job)
    assert [whole for whole, _ in found] == [(torch.Tensor, ["exp"])] * 2
    assert [end for _, end in found] == [(2, 4), "raised"]


@pytest.mark.world(4)
def test_a_rank_holds_only_the_key_heads_that_it_needs(ranks):
    def job():
        mesh = cases.tp_mesh()
        model, batches, loss = cases.case("llama-2kv")
        apply_plan(model, make_plan(model, 4, sample=lambda m: loss(m, batches())), mesh)
        attention = model.model.layers[0].self_attn
        with cases.double(), mixing(mesh):
            loss(model, batches()).backward()
        weight, bias = attention.k_proj.weight, attention.v_proj.bias
        shapes = [tuple(p.to_local().shape) for p in (weight, bias)]
        return shapes, held_runs(weight)[0], is_first_copy(weight), weight.grad.to_local()

    found = ranks(job)
    assert all(shapes == [(4, 32), (4,)] for shapes, *_ in found)
    assert [held for _, held, *_ in found] == [[(0, 4)], [(0, 4)], [(4, 4)], [(4, 4)]]
    assert [first for _, _, first, _ in found] == [True, False, True, False]
    gradients = [grad for *_, grad in found]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[2], gradients[3])
