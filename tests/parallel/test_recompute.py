"""Activation checkpointing: the same numbers to the bit, whatever is kept and recomputed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.errors import TrainingError
from paceline.parallel.recompute import Recompute, recompute


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Block(nn.Module):
    """Attention, a feed-forward with dropout and a batch norm; a keyword, a tuple."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=dropout)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.batch_norm = nn.BatchNorm1d(width)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, str]:
        self.calls += 1
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.feed(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x * scale, "not a tensor"


class Model(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=torch.tensor(1.1))
        return self.head(x)


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def train(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """Gradients and buffers after some accumulated steps."""
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5, 8)).pow(2).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | dict(model.named_buffers())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("mode", "blocks"),
    [
        ("full", [0, 1, 2, 3]),
        (2, [0, 2]),
        ("selective", [0, 1, 2, 3]),
        (Recompute("selective", keep=["aten.addmm", torch.ops.aten.bmm.default]), [0, 1, 2, 3]),
        (Recompute(blocks="blocks.[13]"), [1, 3]),
        (Recompute(blocks=lambda name, module: name == "blocks.2"), [2]),
        (Recompute("selective", every=3), [0, 3]),
    ],
)
def test_same_gradients_and_buffers_to_the_bit(mode: Any, blocks: list[int]) -> None:
    plain, saving = make(Model), make(Model)
    assert recompute(saving, mode) == [f"blocks.{index}" for index in blocks]
    assert_equal(train(saving), train(plain))
    calls = [block.calls for block in saving.blocks]  # type: ignore[union-attr]
    assert calls == [4 if index in blocks else 2 for index in range(4)]
    assert [n for n, _ in saving.named_modules()] == [n for n, _ in plain.named_modules()]
    assert saving.state_dict().keys() == plain.state_dict().keys()


def test_no_recomputation_without_gradients_and_none_once_taken_off() -> None:
    model = make(Model)
    recompute(model, "full")
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 5, 8))
    assert [block.calls for block in model.blocks] == [1] * 4  # type: ignore[union-attr]
    assert recompute(model, None) == []
    assert not any("forward" in vars(module) for module in model.modules())
    recompute(model, "full")
    assert recompute(model, 4) == ["blocks.0"]  # the new request replaces the old one
    model.train()
    train(model, steps=1)
    assert [block.calls for block in model.blocks] == [3, 2, 2, 2]  # type: ignore[union-attr]


def test_a_deep_copy_computes_with_its_own_parameters() -> None:
    model = make(Model)
    recompute(model, "full")
    twin = copy.deepcopy(model)
    train(twin)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_an_earlier_replacement_of_forward_stays_inside() -> None:
    model = make(Model)
    block: Any = model.blocks[0]  # type: ignore[index]
    original = block.forward
    seen = []
    block.forward = lambda *args, **kwargs: (seen.append(1), original(*args, **kwargs))[1]
    mine = block.forward
    recompute(model, "full")
    train(model, steps=1)
    assert len(seen) == 2
    recompute(model, None)
    assert block.forward is mine


class Widen(TorchFunctionMode):
    """Like the engine's fp64 mode: turns ``.float()`` into ``.double()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if func is Tensor.float else func)(*args, **(kwargs or {}))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().tanh().to(x.dtype)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_recomputation_runs_in_the_context_of_the_forward(mode: str) -> None:
    opened = []

    @contextmanager
    def context() -> Iterator[None]:
        opened.append(True)
        with Widen():
            yield

    def run(model: nn.Module) -> Tensor:
        with context():
            loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return model[0].linear.weight.grad  # type: ignore[index, union-attr, return-value]

    def kind() -> nn.Module:
        return nn.Sequential(Narrow(), Narrow())

    expected = run(make(kind))
    saving = make(kind)
    recompute(saving, mode, context=context)
    opened.clear()
    assert torch.equal(run(saving), expected)
    assert len(opened) == 1 + 2
    without = make(kind)
    recompute(without, mode)
    with pytest.raises((RuntimeError, torch.utils.checkpoint.CheckpointError)):
        run(without)


def test_a_power_iteration_starts_from_where_the_forward_did() -> None:
    def kind() -> nn.Module:
        normed = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3)]
        return nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in normed))

    plain, saving = make(kind), make(kind)
    recompute(saving, "full")
    assert_equal(train(saving, 3), train(plain, 3))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_hugging_face_models(name: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    small = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    configs: dict[str, Any] = {
        "Llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=32)
        ),
        "GPT2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
        ),
        "Bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**small, intermediate_size=32)
        ),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=50,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
    }
    tokens = torch.arange(24).view(2, 12)

    def run(saving: bool) -> dict[str, Tensor]:
        model = make(configs[name])
        model.train()
        if saving:
            assert len(recompute(model, mode)) == (4 if name == "T5" else 2)
        torch.manual_seed(1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    assert_equal(run(True), run(False))


def compilable() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    )


# torch's own, about any compiled module whose input is another one's output.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks(mode: str) -> None:
    plain, saving = make(compilable), make(compilable)
    recompute(saving, mode)
    for block in saving:  # type: ignore[attr-defined]
        block.compile(backend="aot_eager", fullgraph=True)
    ours, theirs = train(saving), train(plain)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


def spread_gradients(how: str, mode: str | None) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))
            for _ in range(3)
        )
    )
    if mode is not None:
        assert len(recompute(model, mode)) == 3
    called: nn.Module = model
    if how == "ddp":
        called = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for block in model:  # type: ignore[attr-defined]
            fully_shard(block, reshard_after_forward=how == "fsdp reshard")
        fully_shard(model, reshard_after_forward=how == "fsdp reshard")
    for step in range(2):
        torch.manual_seed(100 + step + torch.distributed.get_rank())
        called(torch.randn(4, 8)).pow(2).sum().backward()
    result = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        result[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return result


@pytest.mark.world(2)
@pytest.mark.parametrize("how", ["ddp", "fsdp reshard", "fsdp keep"])
def test_under_data_parallelism(ranks: Any, how: str) -> None:
    def job() -> bool:
        expected = spread_gradients(how, None)
        for mode in ("full", "selective"):
            assert_equal(spread_gradients(how, mode), expected)
        return True

    assert all(ranks(job))


def test_a_kept_result_that_is_changed_in_place_is_refused_with_advice() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(2))
    )
    recompute(model, "selective")
    with pytest.raises(RuntimeError, match="mutated") as caught:
        train(model)
    assert "inplace=False" in caught.value.__notes__[0]
    recompute(model, "full")
    train(model)


def test_children_of_a_sequential_where_nothing_repeats() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert recompute(model, "full") == ["0", "2"]
    wrapped = nn.Module()
    wrapped.body = model
    assert recompute(wrapped, "full") == ["body.0", "body.2"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "mode", "message"),
    [
        (Odd(), "full", r"no repeated blocks.*blocks=.*left, right"),
        (Odd(), Recompute(blocks="rigth"), "'rigth' matches no module. Near names: right"),
        (Odd(), Recompute(blocks=lambda n, m: False), "chooses no module"),
        (Model(), Recompute(blocks="blocks"), r"ModuleList.*as in 'blocks\.\*'"),
        (Model(), Recompute("selective", keep=["aten.matmull"]), "'aten.matmull'.*no operator"),
        (Model(), Recompute("selective", keep=["aten.native_dropout"]), "draws random numbers"),
        (Model(), Recompute("selective", keep=[]), "must be a list of operators"),
    ],
)
def test_mistakes_are_named(model: nn.Module, mode: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        recompute(model, mode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mode="half"), "mode='half' must be 'full' or 'selective'"),
        (dict(every=0), "every=0 must be"),
        (dict(keep=["aten.mm"]), "mode='full' keeps none"),
    ],
)
def test_options_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Recompute(**arguments)
