"""``deepspeed.initialize`` and its engine, on ranks that compare with one process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline.compat.deepspeed as deepspeed
from paceline.compat.deepspeed import pipe
from paceline.compat.deepspeed.loss_scale import DeepSpeedScaler
from paceline.config.deepspeed.settings import Fp16Scaling
from paceline.errors import CheckpointError, ConfigError, NonFiniteError, TrainingError
from paceline.testing import RankPool
from paceline.world import World

# Ranks add gradients in another order than one process does; float64 leaves that in the last bits.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
SAMPLES = 8
ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)
    ).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 6, generator=source, dtype=torch.float64)
    return x.to(dtype), torch.randn(SAMPLES, 3, generator=source, dtype=torch.float64).to(dtype)


def share(tensor: torch.Tensor) -> torch.Tensor:
    world = World.current()
    return tensor.chunk(world.size)[world.rank]


def settings(stage: int, passes: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES * passes,
        "gradient_accumulation_steps": passes,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        **more,
    }


def engine_of(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    model = net(dtype)
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return made


def train(engine: Any, steps: range, dtype: torch.dtype = torch.float64) -> list[float]:
    """The losses of micro-batches, over all ranks."""
    losses = []
    for step in steps:
        x, y = batch(step, dtype)
        loss = functional.mse_loss(engine(share(x)).to(dtype), share(y))
        engine.backward(loss)
        engine.step()
        losses.append(deepspeed_mean(loss))
    return losses


def deepspeed_mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    if World.current().size > 1:
        deepspeed.comm.all_reduce(total)
    return float(total) / World.current().size


def alone(
    micro: int,
    passes: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """What torch makes of it in one process: losses, parameters, the norms of gradients."""
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses, norms, updates = [], [], 0
    for step in range(micro):
        if schedule:
            # DeepSpeed counts from -1: two steps without a rate come first.
            optimizer.param_groups[0]["lr"] = 0.05 * min(max(updates - 1, 0) / 4, 1.0)
        x, y = batch(step, dtype)
        loss = functional.mse_loss(model(x), y)
        (loss / passes).backward()
        losses.append(float(loss))
        if (step + 1) % passes == 0:
            bound = float("inf") if clip is None else clip
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), bound)))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return losses, {k: v.detach() for k, v in model.named_parameters()}, norms


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: deepspeed.utils.whole_parameter(p) for name, p in engine.module.named_parameters()
    }


def same(engine: Any, parameters: dict[str, torch.Tensor], **close: float) -> None:
    torch.testing.assert_close(whole(engine), parameters, **(close or CLOSE))


def trains_like_one_process(stage: int) -> None:
    losses, parameters, norms = alone(6)
    engine = engine_of(settings(stage))
    torch.testing.assert_close(train(engine, range(6)), losses, **CLOSE)
    same(engine, parameters)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-7)
    assert (engine.global_steps, engine.global_samples) == (6, 6 * SAMPLES)
    assert engine.zero_optimization_stage() == stage
    engine.eval()
    x, y = batch(9)
    with torch.no_grad():
        assert engine(share(x)).shape == share(y).shape

    losses, parameters, norms = alone(6, passes=2, clip=0.1, schedule=True)
    engine = engine_of(settings(stage, 2, gradient_clipping=0.1, scheduler=WARMUP))
    torch.testing.assert_close(train(engine, range(6)), losses, **CLOSE)
    # 1e-6 is added to the norm where it is divided by: torch does, in the norm's own dtype.
    same(engine, parameters, rtol=1e-7, atol=1e-9)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-7)
    assert (engine.global_steps, engine.micro_steps) == (3, 6)
    assert engine.get_lr() == [pytest.approx(0.05 * 2 / 4)]


def half_precision(stage: int) -> None:
    engine = engine_of(settings(stage, bf16={"enabled": True}), torch.float32)
    losses = train(engine, range(4), torch.float32)
    # bf16 has 8 bits of mantissa: 2^-8 on each loss, grown over four steps.
    torch.testing.assert_close(losses, alone(4, dtype=torch.float32)[0], rtol=0.03, atol=0.01)
    assert engine.bfloat16_enabled()

    scaling = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    engine = engine_of(settings(stage, fp16=scaling), torch.float32)
    before = whole(engine)
    x, y = batch(0, torch.float32)
    loss = functional.mse_loss(engine(share(x)).float(), share(y))
    # Only the last rank overflows: all of them leave the step out.
    engine.backward(loss * float("inf") if engine.global_rank == engine.world_size - 1 else loss)
    engine.step()
    same(engine, before)
    assert (engine.skipped_steps, engine.cur_scale, engine.was_step_applied()) == (1, 8.0, False)
    losses = train(engine, range(4), torch.float32)
    torch.testing.assert_close(losses, alone(4, dtype=torch.float32)[0], rtol=0.01, atol=0.01)
    assert (engine.skipped_steps, engine.global_steps, engine.cur_scale) == (1, 5, 16.0)
    assert engine.was_step_applied()


def trains_everywhere(folder: str) -> None:
    for stage in range(4):
        trains_like_one_process(stage)
    for stage in (0, 2):
        half_precision(stage)
    saves(folder)
    goes_on(folder)
    gathers()
    reads_its_own_loader()


def saves(folder: str) -> None:
    engine = engine_of(settings(2, scheduler=WARMUP))
    train(engine, range(2))
    assert engine.save_checkpoint(folder, client_state={"epoch": 3})
    assert engine.save_checkpoint(folder, tag="again", save_latest=False)
    train(engine, range(2, 3))
    assert engine.save_checkpoint(folder, tag="again", save_latest=False)
    engine.save_16bit_model(folder, "weights.bin")
    weights = torch.load(Path(folder) / "weights.bin", weights_only=True)
    torch.testing.assert_close(weights, whole(engine), **CLOSE)


def goes_on(folder: str) -> None:
    """At any stage and number of ranks, from what any other saved."""
    losses, parameters, _ = alone(5, schedule=True)
    for stage in (0, 3):
        engine = engine_of(settings(stage, scheduler=WARMUP))
        path, client = engine.load_checkpoint(folder)
        assert str(path).endswith("global_step2")
        assert client == {"epoch": 3}
        assert (engine.global_steps, engine.global_samples) == (2, 2 * SAMPLES)
        torch.testing.assert_close(train(engine, range(2, 5)), losses[2:], **CLOSE)
        same(engine, parameters)
    engine = engine_of(settings(1, scheduler=WARMUP))
    assert engine.load_checkpoint(folder, tag="again")[1] == {}
    assert engine.global_steps == 3
    with pytest.raises(CheckpointError, match="no such folder"):
        engine.load_checkpoint(folder, tag="never")
    with pytest.warns(UserWarning, match="no file 'latest'"):
        assert engine.load_checkpoint(folder + "/nowhere") == (None, None)


def gathers() -> None:
    engine = engine_of(settings(3))
    parameter = engine.module[0].weight
    expected = net()[0].weight.detach()
    with deepspeed.zero.GatheredParameters(parameter):
        assert torch.equal(parameter.detach(), expected)
        parameter.data.copy_(torch.zeros_like(expected))
    torch.testing.assert_close(deepspeed.utils.whole_parameter(parameter), expected)
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if engine.global_rank == 0:
            nn.init.constant_(parameter, 2.0)
    twos = torch.full_like(expected, 2.0)
    torch.testing.assert_close(deepspeed.utils.whole_parameter(parameter), twos)
    train(engine, range(2))


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index), dtype=torch.float64), index


def reads_its_own_loader() -> None:
    model = net()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=settings(1), training_data=Numbered()
    )
    seen = []
    for x, index in loader:
        engine.backward(functional.mse_loss(engine(x), torch.zeros(len(x), 3).double()))
        engine.step()
        seen += index.tolist()
    everyone: list[Any] = [None] * World.current().size
    deepspeed.comm.all_gather_object(everyone, seen)
    assert sorted({i for part in everyone for i in part} - {0}) == list(range(1, 20))
    assert engine.global_steps == len(range(0, 20, SAMPLES))


def layers(loss: Any = functional.mse_loss, **options: Any) -> pipe.PipelineModule:
    torch.manual_seed(3)
    tied: dict[str, Any] = {"dtype": torch.float64}
    return pipe.PipelineModule(
        layers=[
            pipe.TiedLayerSpec("same", nn.Linear, 6, 6, **tied),
            torch.tanh,
            pipe.LayerSpec(nn.Linear, 6, 6, dtype=torch.float64),
            nn.Linear(6, 6, dtype=torch.float64),
            lambda x: x * 0.5,
            pipe.TiedLayerSpec("same", nn.Linear, 6, 6, **tied),
            nn.Linear(6, 3, dtype=torch.float64),
        ],
        loss_fn=loss,
        **options,
    )


def a_pipeline(folder: str) -> None:
    reference = layers(num_stages=1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.05, weight_decay=0.1)
    expected = []
    for step in range(4):
        total = 0.0
        for part in (2 * step, 2 * step + 1):
            x, y = batch(part)
            loss = functional.mse_loss(reference(x), y) / 2
            loss.backward()
            total += float(loss)
        expected.append(total)
        optimizer.step()
        optimizer.zero_grad()
    copies = World.current().size // 2
    for method in ("parameters", "uniform", "type:linear"):
        model = layers(num_stages=2, partition_method=method)
        config = settings(0) | {
            "train_micro_batch_size_per_gpu": SAMPLES // copies,
            "gradient_accumulation_steps": 2,
        }
        del config["train_batch_size"]
        engine, *_ = deepspeed.initialize(model=model, config=config)
        copy = engine.data_parallel_rank

        def parts(first: int, copy: int = copy) -> Any:
            for part in range(first, 100):
                x, y = batch(part)
                yield x.chunk(copies)[copy], y.chunk(copies)[copy]

        own = parts(0)
        losses = [float(engine.train_batch(data_iter=own)) for _ in range(2)]
        engine.save_checkpoint(folder, tag=method, client_state={"at": 2})
        losses += [float(engine.train_batch(data_iter=own)) for _ in range(2)]
        torch.testing.assert_close(losses, expected, **CLOSE)
        assert engine.global_steps == 4
        evaluated = float(engine.eval_batch(parts(0)))
        with torch.no_grad():
            wanted = sum(
                float(functional.mse_loss(reference(batch(i)[0]), batch(i)[1])) for i in (0, 1)
            )
        assert evaluated == pytest.approx(wanted / 2)
        assert engine.load_checkpoint(folder, tag=method)[1] == {"at": 2}
        again = parts(4)
        losses = [float(engine.train_batch(data_iter=again)) for _ in range(2)]
        torch.testing.assert_close(losses, expected[2:], **CLOSE)
    with pytest.raises(AttributeError, match="train_batch"):
        _ = engine.backward
    with pytest.raises(TrainingError, match="whole steps"):
        engine(torch.zeros(1, 6))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_like_one_process(rank_pool: RankPool, tmp_path: Path, ranks: int) -> None:
    rank_pool.run(trains_everywhere, str(tmp_path), world_size=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_trains_like_one_process(
    rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    rank_pool.run(a_pipeline, str(tmp_path), world_size=ranks)


def test_a_checkpoint_of_two_ranks_goes_on_at_four(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(saves, str(tmp_path), world_size=2)
    rank_pool.run(goes_on, str(tmp_path), world_size=4)


def one_process() -> None:
    for stage in (0, 2):
        losses, parameters, _ = alone(4, clip=0.1)
        engine = engine_of(settings(stage, gradient_clipping=0.1))
        torch.testing.assert_close(train(engine, range(4)), losses, **CLOSE)
        same(engine, parameters, rtol=1e-7, atol=1e-9)


def answers() -> None:
    engine = engine_of(settings(0))
    for wrong, said in (
        (lambda: engine.step(), "no engine.backward"),
        (lambda: engine.backward(torch.zeros(3)), "mean"),
        (lambda: engine.backward(torch.zeros(()), allreduce=1), "retain_graph"),
        (lambda: deepspeed.initialize(config={}), "model="),
        (lambda: deepspeed.initialize(model=net(), config=settings(0), mpu=3), "mpu="),
    ):
        with pytest.raises(TrainingError, match=said):
            wrong()
    with pytest.raises(ConfigError, match="no DeepSpeed config"):
        deepspeed.initialize(model=net())
    with pytest.raises(AttributeError, match=r"engine\.nowhere"):
        _ = engine.nowhere
    with pytest.raises(AttributeError, match="predict"):
        _ = deepspeed.init_inference
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "ds.json")
    with deepspeed.zero.Init(), warnings.catch_warnings():
        nn.Linear(2, 2)


def what_scripts_import() -> None:
    from paceline.compat.deepspeed.accelerator import get_accelerator
    from paceline.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from paceline.compat.deepspeed.runtime.lr_schedules import WarmupDecayLR
    from paceline.compat.deepspeed.runtime.utils import see_memory_usage
    from paceline.compat.deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
    )

    assert get_accelerator() is deepspeed.get_accelerator()
    device = World.current().device
    get_accelerator().set_device(0)
    assert torch.device(get_accelerator().device_name(0)).type == device.type
    assert torch.device(get_accelerator().current_device_name()).type == device.type
    assert get_accelerator().memory_allocated() >= 0
    get_accelerator().synchronize()
    get_accelerator().manual_seed_all(3)
    with pytest.raises(AttributeError, match=r"torch\.accelerator"):
        get_accelerator().create_op_builder("FusedAdamBuilder")
    assert deepspeed.dist is deepspeed.comm
    assert callable(get_fp32_state_dict_from_zero_checkpoint)
    assert int(deepspeed.__version__.partition(".")[0]) == 0
    see_memory_usage("before", force=True)

    weight, expected = (nn.Parameter(torch.ones(3)) for _ in range(2))
    torch_adam = torch.optim.AdamW([expected], lr=0.1, weight_decay=0.0)
    theirs = DeepSpeedCPUAdam([weight], lr=0.1)
    for optimizer, parameter in ((theirs, weight), (torch_adam, expected)):
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
        optimizer.step()
    assert torch.equal(weight, expected)
    assert FusedAdam([weight], adam_w_mode=False).defaults["weight_decay"] == 0
    with pytest.raises(TrainingError, match="amsgrad=True"):
        FusedAdam([weight], amsgrad=True)
    # What a warm-up of no steps is in DeepSpeed: two.
    assert WarmupDecayLR(theirs, 10, warmup_num_steps=0).warmup_num_steps == 2


def what_scripts_ask_of_an_engine() -> None:
    engine = engine_of(settings(3, passes=2))
    whole = engine.module_state_dict()
    assert {name: value.shape for name, value in whole.items()} == {
        name: value.shape for name, value in net().state_dict().items()
    }
    engine.load_module_state_dict({name: value + 1 for name, value in whole.items()})
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, whole[name] + 1)
    with pytest.raises(CheckpointError, match=r"lacks 0\.weight"):
        engine.load_module_state_dict({})
    size = World.current().size
    engine.set_train_batch_size(SAMPLES * 4)
    assert engine.get_batch_info() == (SAMPLES * 4, SAMPLES // size, 4)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (8 * size, 2, 4)
    with pytest.raises(TrainingError, match=r"set_train_batch_size\(3\).*multiple"):
        engine.set_train_batch_size(3)
    seen = [int(x) for part in engine.deepspeed_io(list(range(4 * size))) for x in part]
    assert seen == list(range(World.current().rank, 4 * size, size))
    engine.destroy()
    # A model that is not trained has nothing to hold back between the batches of a step.
    alone, *_ = deepspeed.initialize(
        model=net(), config={**settings(0, passes=2), "optimizer": None}
    )
    assert alone(batch(0)[0]).shape == (SAMPLES, 3)


def autos_of_training_arguments() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        deepspeed.initialize(model=net(), config=auto)
    said = {"per_device_train_batch_size": 4, "learning_rate": 0.1, "warmup_steps": 0}
    epochs = argparse.Namespace(**said, max_steps=-1)  # as Hugging Face's, where epochs are given
    with pytest.raises(ConfigError, match=r"total_num_steps is \"auto\".*max_steps"):
        deepspeed.initialize(args=epochs, model=net(), config=auto)
    steps = argparse.Namespace(**said, max_steps=10)
    engine, *_ = deepspeed.initialize(args=steps, model=net(), config=auto)
    assert engine.train_micro_batch_size_per_gpu() == 4


def habits() -> None:
    what_scripts_import()
    what_scripts_ask_of_an_engine()
    autos_of_training_arguments()


def test_one_rank(rank_pool: RankPool) -> None:
    rank_pool.run(one_process, world_size=1)
    rank_pool.run(answers, world_size=1)


def test_names_that_deepspeeds_scripts_use(rank_pool: RankPool) -> None:
    rank_pool.run(habits, world_size=2)


def test_log_dist_is_shown() -> None:
    code = (
        "import paceline.compat.deepspeed as deepspeed\n"
        "deepspeed.init_distributed(); deepspeed.log_dist('epoch 3', ranks=[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "[rank 0] epoch 3" in done.stdout, done


def test_the_scale_follows_overflows_as_deepspeeds_does() -> None:
    """The scales that DeepSpeed 0.19.8 has after each of these steps; see the parity table."""
    scaler = DeepSpeedScaler(Fp16Scaling(initial=16.0, window=3, hysteresis=2))
    scales = []
    for step in range(12):
        scaler.update(step in (1, 2, 7))
        scales.append(scaler.scale)
    assert scales == [16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 16, 32]
    scaler = DeepSpeedScaler(Fp16Scaling(initial=2.0, hysteresis=1))
    scaler.update(True)
    with pytest.raises(NonFiniteError, match="min_loss_scale"):
        scaler.update(True)
