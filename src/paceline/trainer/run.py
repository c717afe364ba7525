"""What each rank of ``paceline train CONFIG`` runs: ``python -m paceline.trainer.run RUN_DIR``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.locate import which_named
from paceline.config import Config, Target, import_target, load
from paceline.config.code import code_folders
from paceline.data.text import ByteText, unigram_loss
from paceline.engine.loss import LossFunction
from paceline.errors import ConfigError, LayoutError
from paceline.events import Baseline, Note, append
from paceline.launch.run_folder import RunFolder
from paceline.layout import Layout
from paceline.layout.fitting import fit
from paceline.layout.layout import read_degrees
from paceline.trainer.arguments import Resume
from paceline.trainer.callbacks import Callback
from paceline.trainer.config_parts import (
    arguments_of,
    make_callbacks,
    make_collate,
    make_function,
    make_metrics,
    make_optimizer,
    make_schedule,
    unsaid_interval,
)
from paceline.trainer.history import History
from paceline.trainer.trainer import Trainer
from paceline.world import World


def from_config(
    config: Config,
    run_dir: Path,
    *,
    resume: Resume,
    settings: Path | None = None,
    own_folder: bool = False,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Build what ``config`` names and train it, on this rank of the world.

    ``settings`` is the file that ``config`` comes from, where the run goes on with other settings
    than it has in ``run_dir``: they become its own when all ranks have accepted them.
    ``own_folder``: this machine does not share ``run_dir`` with that of rank 0. ``callbacks`` come
    after those of ``config``.
    """
    world = World.init(
        device=config.launch.device,
        share_gpu=config.launch.share_gpu,
        timeout=config.launch.timeout,
        hang_after=config.hangs.after or 0.0,
    )
    layout = layout_for(config, world.size)
    torch.manual_seed(config.seed)  # the same initial weights on every rank
    model = make_model(config)
    train, val = make_datasets(config)
    if world.is_main:
        _tell_about(config, layout, train, val, run_dir, again=world.restart_count > 0)
    optimizer = make_optimizer(config, model)
    trainer = make_trainer(
        config,
        model,
        run_dir,
        optimizer=optimizer,
        **engine_options(config, train, optimizer, layout),
    )
    trainer.callbacks += callbacks
    trainer.grace = config.launch.grace
    if settings is not None and (world.is_main or (own_folder and world.local_rank == 0)):
        new = settings.read_text(encoding="utf-8")
        trainer.when_accepted = lambda: RunFolder(run_dir).save_config(new)
    return trainer.fit(
        train, val, epochs=config.train.epochs, steps=config.train.steps, resume=resume
    )


def make_trainer(config: Config, model: nn.Module, run_dir: Path, **more: Any) -> Trainer:
    """The trainer of ``model`` that ``config`` describes; ``more``: its optimizer and engine."""
    trainer = Trainer(
        model,
        loss=make_loss(config),
        global_batch=config.batch.global_batch,
        run_dir=run_dir,
        seed=config.seed,
        measure_memory=config.track.memory,
        split_every=config.track.split_every,
        metrics=make_metrics(config),
        callbacks=make_callbacks(config),
        progress=False,  # the launcher reads the events and shows them
        data=config.data.options(make_collate(config)),
        evaluation=config.train.evaluation(),
        checkpoint=config.checkpoint.options(),
        **more,
    )
    trainer.events_are_shown = True
    return trainer


def layout_for(config: Config, ranks: int) -> Layout:
    """The layout of ``config`` on a world of ``ranks``, which may have lost or gained some."""
    layout = fit(config.layout, ranks)
    if layout is None:
        raise LayoutError(
            f"layout {config.layout!r} does not fit on {ranks} rank{'' if ranks == 1 else 's'}, "
            "not even with dp=1. Start more ranks, or change the layout."
        )
    return layout


def _tell_about(
    config: Config, layout: Layout, train: Any, val: Any, run_dir: Path, *, again: bool
) -> None:
    """Write what the trainer does not know: another layout than asked for, and the baseline."""
    if any(getattr(layout, axis) != asked for axis, asked in read_degrees(config.layout).items()):
        append(run_dir, Note(message=f"goes on as {layout} (asked for: {config.layout})"))
    if not again and (unsaid := unsaid_interval(config)) is not None:
        append(run_dir, Note(message=unsaid))
    if not again and isinstance(train, ByteText) and isinstance(val, ByteText):
        loss = unigram_loss(train, val)
        append(run_dir, Baseline(name="byte unigrams of the same text", loss=loss))


def engine_options(
    config: Config, train: Any, optimizer: Optimizer, layout: Layout | None = None
) -> dict[str, Any]:
    """The engine's options that ``config`` names, for ``optimizer`` on the dataset ``train``.

    ``layout`` stands in for that of ``config``.
    """
    options = config.engine_options(
        layout=layout or config.layout, schedule=make_schedule(config, train, optimizer)
    )
    return options.arguments()


def make_model(config: Config) -> nn.Module:
    """The model that ``config`` names, on the CPU."""
    model = import_target(config.model.target, code_folders(config))(
        **arguments_of(config.model.args)
    )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target {config.model.target!r} made a {type(model).__name__}, not a "
            "torch.nn.Module."
        )
    return model


def make_datasets(config: Config) -> tuple[Any, Any]:
    """The training and the validation dataset; the latter may be ``None``."""
    made = import_target(config.data.target, code_folders(config))(**arguments_of(config.data.args))
    train, val = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return train, val if config.data.val is None else _make_val(config.data.val, config)


def make_dataset(config: Config, name: str) -> Any:
    """The ``train`` or ``val`` dataset alone; the other is not made where it need not be."""
    if name == "val" and config.data.val is not None:
        return _make_val(config.data.val, config)
    train, val = make_datasets(config)
    if name == "train":
        return train
    if val is None:
        raise ConfigError(
            f"the run has no validation data: data.target {config.data.target!r} returns one "
            "dataset, and data.val is not set. Name the data with --data package.module:function, "
            "or --data train."
        )
    return val


def _make_val(target: Target, config: Config) -> Any:
    return import_target(target.target, code_folders(config))(**arguments_of(target.args))


def make_loss(config: Config) -> LossFunction | None:
    """A class makes the loss; a function is the loss, with its arguments filled in."""
    if config.loss is None:
        return None
    return cast(LossFunction, make_function(config, config.loss.target, config.loss.args))


def main() -> None:
    """Train the run whose folder is named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--which")
    parser.add_argument("--settings", type=Path)
    # That of the launcher, where others may have written the one in the run's folder.
    parser.add_argument("--config", type=Path)
    parser.add_argument("--own-folder", action="store_true")
    # Where this machine has the modules; the settings may be those of another one.
    parser.add_argument("--code", nargs="*", metavar="FOLDER")
    asked = parser.parse_args()
    config = load(asked.settings or asked.config or asked.run_dir / "config.yaml")
    from_config(
        config if asked.code is None else config.model_copy(update={"code": asked.code}),
        asked.run_dir,
        resume=asked.resume if asked.which is None else which_named(asked.which),
        settings=asked.settings,
        own_folder=asked.own_folder,
    )


if __name__ == "__main__":
    main()
