"""What is meant by the names that people bring from other libraries, each with an example.

Many names mean the same: ``batch_size``, ``train_batch_size`` and ``global_batch_size`` are one
``Meaning``. ``names.py`` says which name has which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Meaning:
    """What something is here, in words that an example can follow.

    Args:
        says: the beginning of the sentence that the example ends.
        python: the example in Python.
        key: the config key that does it; ``None`` where a config has none.
        value: an example of its value, as it is written in a config.
        note: what to know of the key where the other library means something slightly different.
        cli: the option of ``paceline train`` for it; by default ``--set`` with key and value.
        at: the example for those who typed it in a certain call, such as ``prepare``.
    """

    says: str
    python: str = ""
    key: str | None = None
    value: str = ""
    note: str = ""
    cli: str = ""
    at: Mapping[str, str] = field(default_factory=dict)

    def sentence(self, call: str = "") -> str:
        """The answer to whoever typed it as an argument of ``call``."""
        example = self.at.get(call, self.python)
        return f"{self.says}: {example}." if example else f"{self.says}."

    @property
    def in_config(self) -> str:
        """How a config says it, such as ``optimizer.lr: 3e-4``; empty where none does."""
        return f"{self.key}: {self.value}" if self.key is not None else ""

    @property
    def on_command_line(self) -> str:
        """How ``paceline train`` is told, such as ``--set optimizer.lr=3e-4``."""
        if self.cli or self.key is None:
            return self.cli
        value = f"'{self.value}'" if " " in self.value else self.value
        return f"--set {self.key}={value}"


_LOADER = "paceline.loader(dataset, global_batch=32, layout=engine.layout)"
_OPTIMIZER = "optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4"
_SCHEDULE = "schedule=paceline.schedules.every('step', torch.optim.lr_scheduler"
_FIT = "trainer.fit(train, epochs=3"

TRAINING: dict[str, Meaning] = {
    "lr": Meaning("The learning rate is the optimizer's", f"{_OPTIMIZER})", "optimizer.lr", "3e-4"),
    "weight_decay": Meaning(
        "Weight decay is the optimizer's",
        f"{_OPTIMIZER}, weight_decay=0.01)",
        "optimizer.weight_decay",
        "0.01",
    ),
    "betas": Meaning(
        "Adam's betas are the optimizer's",
        f"{_OPTIMIZER}, betas=(0.9, 0.95))",
        "optimizer.args.betas",
        "[0.9, 0.95]",
    ),
    "eps": Meaning(
        "Adam's epsilon is the optimizer's",
        f"{_OPTIMIZER}, eps=1e-8)",
        "optimizer.args.eps",
        "1e-8",
    ),
    "momentum": Meaning(
        "Momentum is the optimizer's",
        "optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "optimizer.args.momentum",
        "0.9",
    ),
    "optimizer": Meaning(
        "The optimizer is an object of torch's", f"{_OPTIMIZER})", "optimizer.name", "adamw"
    ),
    "optimizer_args": Meaning(
        "An optimizer's arguments are given where it is made",
        f"{_OPTIMIZER}, fused=True)",
        "optimizer.args",
        "{fused: true}",
    ),
    "schedule": Meaning(
        "The learning rate's course is schedule, one of torch's schedulers or a function of the "
        "step",
        f"{_SCHEDULE}.CosineAnnealingLR(optimizer, T_max=1000))",
        "schedule.name",
        "cosine",
    ),
    "schedule_args": Meaning(
        "A scheduler's arguments are given where it is made",
        f"{_SCHEDULE}.StepLR(optimizer, step_size=100, gamma=0.5))",
        "schedule.args",
        "{step_size: 100}",
    ),
    "warmup": Meaning(
        "Warm-up is a part of schedule, in steps",
        f"{_SCHEDULE}.LinearLR(optimizer, start_factor=0.01, total_iters=100))",
        "schedule.warmup_steps",
        "100",
        "a number of steps",
    ),
    "min_lr": Meaning(
        "Where the learning rate ends is a part of schedule",
        f"{_SCHEDULE}.CosineAnnealingLR(optimizer, T_max=1000, eta_min=3e-5))",
        "schedule.min_ratio",
        "0.1",
        "a fraction of the full rate",
    ),
    "clip_norm": Meaning(
        "The bound on the gradient's norm is clip_norm",
        "paceline.Trainer(model, ..., clip_norm=1.0)",
        "train.clip_norm",
        "1.0",
        at={
            "Engine": "paceline.Engine(model, ..., clip_norm=1.0)",
            "prepare": "paceline.Accelerator().clip_grad_norm_(model.parameters(), 1.0)",
        },
    ),
    "clip_value": Meaning(
        "The bound on each element of the gradient is clip_value, that on its norm clip_norm",
        "paceline.Trainer(model, ..., clip_value=0.5)",
        "train.clip_value",
        "0.5",
        "train.clip_norm: the norm instead",
        at={
            "Engine": "paceline.Engine(model, ..., clip_value=0.5)",
            "prepare": "paceline.Accelerator().clip_grad_value_(model.parameters(), 0.5)",
        },
    ),
    "loss": Meaning(
        "The loss is a function of output and target",
        "paceline.Trainer(model, ..., loss=torch.nn.CrossEntropyLoss())",
        "loss.target",
        "torch.nn:CrossEntropyLoss",
    ),
    "label_smoothing": Meaning(
        "Label smoothing is the loss function's",
        "loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1)",
        "loss.args",
        "{label_smoothing: 0.1}",
    ),
    "class_weight": Meaning(
        "Weights of classes are the loss function's",
        "loss=torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))",
    ),
    "sample_weight": Meaning(
        "Weights of samples are an item of each batch that the loss uses, which then returns "
        "(sum, count)",
        "paceline.Trainer(model, ..., forward=weighted_loss)",
    ),
    "metrics": Meaning(
        "Metrics are functions of output and target, by name",
        "paceline.Trainer(model, ..., metrics={'accuracy': accuracy})",
        "metrics",
        "{accuracy: {target: mine:accuracy}}",
    ),
    "nonfinite": Meaning(
        "What happens on NaN or Inf is nonfinite",
        "paceline.Trainer(model, ..., nonfinite='skip')",
        "train.nonfinite",
        "skip",
        at={"Engine": "paceline.Engine(model, ..., nonfinite='skip')"},
    ),
    "sync_batchnorm": Meaning(
        "Batch norm over all ranks is sync_batchnorm",
        "paceline.Trainer(model, ..., sync_batchnorm=True)",
        "train.sync_batchnorm",
        "true",
        at={"Engine": "paceline.Engine(model, ..., sync_batchnorm=True)"},
    ),
    "freeze": Meaning(
        "Parameters that are not trained are named by freeze",
        "paceline.Trainer(model, ..., freeze=['embeddings.*'])",
        "train.freeze",
        "['embeddings.*']",
        at={"Engine": "paceline.Engine(model, ..., freeze=['embeddings.*'])"},
    ),
    "ema": Meaning(
        "The moving average of the weights is ema, its decay",
        "paceline.Trainer(model, ..., ema=0.999)",
        "ema.decay",
        "0.999",
        at={"Engine": "paceline.Engine(model, ..., ema=0.999)"},
    ),
    "epochs": Meaning(
        "fit takes the length of a run, in epochs or in steps",
        f"{_FIT})",
        "train.epochs",
        "3",
    ),
    "steps": Meaning(
        "fit takes the length of a run, in steps or in epochs",
        "trainer.fit(train, steps=1000)",
        "train.steps",
        "1000",
    ),
    "train_data": Meaning(
        "Data is what fit takes first, a dataset or a DataLoader, and the model belongs to the "
        "Trainer",
        "trainer.fit(train, val, epochs=3)",
        "data.target",
        "mine:Dataset",
    ),
    "val_data": Meaning(
        "Validation data is what fit takes second",
        "trainer.fit(train, val, epochs=3)",
        "data.val",
        "{target: mine:Dataset}",
    ),
    "test_data": Meaning(
        "Data to test on or to predict is given to evaluate and predict",
        "trainer.evaluate(test)",
    ),
    "val_split": Meaning(
        "The split is made before, with torch.utils.data.random_split",
        "trainer.fit(*torch.utils.data.random_split(dataset, [0.9, 0.1]), epochs=3)",
    ),
    "model": Meaning(
        "The model is the Trainer's first argument, built", "paceline.Trainer(Net(), ...)"
    ),
    "forward": Meaning(
        "A training step of one's own is forward, which returns the loss",
        "paceline.Trainer(model, ..., forward=training_step)",
        at={"Engine": "paceline.Engine(model, ..., forward=training_step)"},
    ),
    "resume": Meaning(
        "To go on with a run, give fit resume=True and the Trainer the run's run_dir",
        "trainer.fit(train, epochs=3, resume=True)",
        cli="--resume runs/mine",
    ),
    "start_from": Meaning(
        "To begin with the weights of another run is start_from",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(start_from='runs/other'))",
        "checkpoint.start_from",
        "runs/other",
    ),
    "seed": Meaning(
        "The seed of data order, dropout and initial weights is seed",
        "paceline.Trainer(model, ..., seed=1)",
        "seed",
        "1",
        at={"Engine": "paceline.World.current().seed(1)"},
    ),
    "deterministic": Meaning(
        "By the seed a run draws the same samples and random numbers on any layout; kernels that "
        "are deterministic too are a setting of torch's",
        "torch.use_deterministic_algorithms(True)",
    ),
    "no_gradients": Meaning("Leave it out, as evaluation and prediction run without gradients"),
    "torch_setting": Meaning(
        "It is a setting of torch's, made in the script",
        "torch.backends.cudnn.benchmark = True",
    ),
    "tf32": Meaning(
        "It is a setting of torch's, made in the script",
        "torch.set_float32_matmul_precision('high')",
    ),
    "anomaly": Meaning(
        "It is a setting of torch's, made in the script; NaN and Inf are found by nonfinite",
        "torch.autograd.set_detect_anomaly(True)",
    ),
    "compile": Meaning(
        "torch.compile is switched on by compile",
        "paceline.Trainer(model, ..., compile=True)",
        "compile",
        "true",
        at={
            "Engine": "paceline.Engine(model, ..., compile=True)",
            "prepare": "model.compile() after prepare",
        },
    ),
    "recompute": Meaning(
        "Activations are recomputed by checkpoint_activations",
        "paceline.Trainer(model, ..., checkpoint_activations='full')",
        "checkpoint_activations",
        "full",
        at={"Engine": "paceline.Engine(model, ..., checkpoint_activations='full')"},
    ),
}
"""The model, its optimizer and what happens in a step."""

BATCHES: dict[str, Meaning] = {
    "global_batch": Meaning(
        "The batch of a step over all ranks is global_batch, and that of one rank per_device_batch",
        "paceline.Trainer(model, ..., global_batch=32)",
        "batch.global_batch",
        "32",
        "samples per step over all ranks; batch.per_device_batch: on each of them",
        at={
            "Engine": _LOADER,
            "loader": "paceline.loader(dataset, global_batch=32)",
            "prepare": "paceline.prepare(model, optimizer, loader, global_batch=32)",
        },
    ),
    "per_device_batch": Meaning(
        "The batch of one rank is per_device_batch",
        "paceline.Trainer(model, ..., per_device_batch=8)",
        "batch.per_device_batch",
        "8",
        at={
            "Engine": "paceline.loader(dataset, per_device_batch=8, layout=engine.layout)",
            "loader": "paceline.loader(dataset, per_device_batch=8)",
            "prepare": "paceline.prepare(model, optimizer, loader, per_device_batch=8)",
        },
    ),
    "accumulate": Meaning(
        "The forward passes that make a step are accumulate",
        "paceline.Trainer(model, ..., per_device_batch=8, accumulate=4)",
        "batch.accumulate",
        "4",
        at={
            "Engine": "paceline.loader(dataset, per_device_batch=8, accumulate=4, "
            "layout=engine.layout)",
            "loader": "paceline.loader(dataset, per_device_batch=8, accumulate=4)",
            "prepare": "paceline.prepare(model, optimizer, loader, accumulate=4)",
        },
    ),
    "microbatch": Meaning(
        "The most samples in one forward pass of a rank are microbatch",
        "paceline.Trainer(model, ..., global_batch=32, microbatch=4)",
        "batch.microbatch",
        "4",
        at={"Engine": "paceline.Engine(model, ..., microbatch=4)"},
    ),
    "eval_batch": Meaning(
        "Validation has the batch of training, or that of a loader of its own",
        "trainer.fit(train, paceline.loader(val, global_batch=64), epochs=3)",
    ),
    "workers": Meaning(
        "The processes that read data on each rank are workers",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(workers=4))",
        "data.workers",
        "4",
        at={
            "loader": "paceline.loader(dataset, global_batch=32, workers=4)",
            "Engine": "paceline.loader(dataset, global_batch=32, workers=4, layout=engine.layout)",
        },
    ),
    "pin_memory": Meaning(
        "Page-locked memory is pin_memory, by itself on where there is a GPU",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(pin_memory=True))",
        "data.pin_memory",
        "true",
    ),
    "drop_last": Meaning(
        "A last, short batch is left out by drop_last",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(drop_last=True))",
        "data.drop_last",
        "true",
        at={"loader": "paceline.loader(dataset, global_batch=32, drop_last=True)"},
    ),
    "shuffle": Meaning(
        "Samples are shuffled by seed unless shuffle says no",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(shuffle=False))",
        "data.shuffle",
        "false",
        at={"loader": "paceline.loader(dataset, global_batch=32, shuffle=False)"},
    ),
    "collate_fn": Meaning(
        "What makes a batch of samples is collate_fn",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(collate_fn=collate))",
        "data.collate_fn",
        "{target: mine:collate}",
        at={"loader": "paceline.loader(dataset, global_batch=32, collate_fn=collate)"},
    ),
    "sampler": Meaning(
        "An order of one's own is a DataLoader's sampler, which fit and loader follow",
        "trainer.fit(torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler), "
        "epochs=3)",
    ),
    "dataloader": Meaning(
        "It is an option of torch's DataLoader, which fit and loader take as it is",
        "trainer.fit(torch.utils.data.DataLoader(dataset, batch_size=32, num_workers=2, "
        "prefetch_factor=4), epochs=3)",
    ),
    "columns": Meaning(
        "A model gets all items of a batch; which ones it has is said by the dataset or by "
        "collate_fn",
        "paceline.Trainer(model, ..., data=paceline.DataOptions(collate_fn=collate))",
    ),
    "distributed_sampler": Meaning(
        "Leave it out, as each global batch is cut over the ranks",
        "paceline.Trainer(model, ..., global_batch=32)",
        at={"Engine": _LOADER},
    ),
    "short_trial": Meaning(
        "A short trial is a run of few steps, or one on a part of the data",
        "trainer.fit(torch.utils.data.Subset(train, range(64)), steps=5)",
        "train.steps",
        "5",
    ),
}
"""The data, and how much of it makes a step."""

EVALUATION_AND_SAVING: dict[str, Meaning] = {
    "eval_every": Meaning(
        "How often to evaluate is Evaluation(every=), in steps",
        "paceline.Trainer(model, ..., evaluation=paceline.Evaluation(every=100))",
        "train.eval_every",
        "100",
        "in steps; without it after each epoch",
    ),
    "eval_epoch": Meaning(
        "Evaluation is after each epoch and at the end, or every so many steps",
        "paceline.Trainer(model, ..., evaluation=paceline.Evaluation(every=100))",
        "train.eval_every",
        "100",
        "in steps; without it after each epoch",
    ),
    "eval_batches": Meaning(
        "How much to evaluate on is Evaluation(batches=), in global batches",
        "paceline.Trainer(model, ..., evaluation=paceline.Evaluation(batches=10))",
        "train.eval_batches",
        "10",
    ),
    "save_every": Meaning(
        "How often to save is Checkpointing(every=), in steps",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(every=100))",
        "checkpoint.every",
        "100",
    ),
    "save_epoch": Meaning(
        "When to save is Checkpointing(every_epoch=True), or every=100 in steps",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(every_epoch=True))",
        "checkpoint.every_epoch",
        "true",
    ),
    "save_minutes": Meaning(
        "To save by time is Checkpointing(every_minutes=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(every_minutes=10))",
        "checkpoint.every_minutes",
        "10",
    ),
    "keep": Meaning(
        "How many checkpoints stay is Checkpointing(keep=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(keep=3))",
        "checkpoint.keep",
        "3",
    ),
    "keep_best": Meaning(
        "How many of the best checkpoints stay is Checkpointing(keep_best=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(best='loss', keep_best=3))",
        "checkpoint.keep_best",
        "3",
    ),
    "best": Meaning(
        "The metric whose best checkpoint stays is Checkpointing(best=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(best='accuracy', "
        "mode='max'))",
        "checkpoint.best",
        "loss",
    ),
    "mode": Meaning(
        "Whether less or more of a metric is better is Checkpointing(mode=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(best='accuracy', "
        "mode='max'))",
        "checkpoint.mode",
        "max",
    ),
    "load_best": Meaning(
        "Keep the best checkpoint and load it after the run",
        "paceline.load_weights(model, 'runs/mine', which='best')",
        "checkpoint.best",
        "loss",
    ),
    "save_at_end": Meaning(
        "Saving at the end is on, unless Checkpointing(save_at_end=False)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(save_at_end=False))",
        "checkpoint.save_at_end",
        "false",
    ),
    "checkpointing": Meaning(
        "A Trainer with a run_dir saves, and one without keeps nothing on disk",
        "paceline.Trainer(model, ..., run_dir='runs/mine')",
        "checkpoint.every",
        "100",
    ),
    "where": Meaning(
        "Another place for checkpoints is Checkpointing(where=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(where='s3://bucket/run'))",
        "checkpoint.where",
        "s3://bucket/run",
    ),
    "storage": Meaning(
        "The options of a file system for checkpoints are Checkpointing(storage=)",
        "paceline.Trainer(model, ..., checkpoint=paceline.Checkpointing(where='s3://bucket/run', "
        "storage={'anon': False}))",
        "checkpoint.storage",
        "{anon: false}",
    ),
    "weights_only": Meaning(
        "A checkpoint is what a run can go on from; the weights alone are exported by a command",
        "paceline checkpoint export runs/mine model.safetensors",
    ),
    "hub": Meaning(
        "Nothing is uploaded; a Hugging Face folder of the weights is written by a command",
        "paceline checkpoint export runs/mine hf-folder --format hf",
    ),
    "early_stopping": Meaning(
        "Early stopping is a callback",
        "paceline.Trainer(model, ..., callbacks=[paceline.EarlyStopping('loss', patience=3)])",
        "early_stopping.patience",
        "3",
    ),
    "callbacks": Meaning(
        "Callbacks are given to the Trainer",
        "paceline.Trainer(model, ..., callbacks=[paceline.EarlyStopping('loss')])",
        "callbacks",
        "[{target: mine:Callback}]",
    ),
    "run_dir": Meaning(
        "The folder of a run is run_dir",
        "paceline.Trainer(model, ..., run_dir='runs/mine')",
        "track.run_dir",
        "runs/mine",
        cli="--run-dir runs/mine",
    ),
    "run_name": Meaning(
        "A run is named by its folder",
        "paceline.Trainer(model, ..., run_dir='runs/mine')",
        "name",
        "mine",
        cli="--name mine",
    ),
    "trackers": Meaning(
        "Where a run is logged is trackers",
        "paceline.Trainer(model, ..., trackers=[paceline.track.TensorBoard('runs/mine')])",
        "track.tensorboard",
        "true",
        "or track.mlflow, track.wandb, track.comet, track.csv",
    ),
    "experiment": Meaning(
        "The project of a tracker is the tracker's own argument",
        "paceline.Trainer(model, ..., trackers=[paceline.track.MLflow(experiment='mine')])",
        "track.mlflow.experiment",
        "mine",
    ),
    "log_every": Meaning(
        "Leave it out, as every step is logged and the history has them all",
        "trainer.fit(train, epochs=3).losses",
    ),
    "progress": Meaning(
        "The progress bar is progress",
        "paceline.Trainer(model, ..., progress=False)",
        "track.progress",
        "false",
    ),
    "log_level": Meaning(
        "What is printed is the progress bar and warnings, with a log for each rank in the run's "
        "folder",
        "paceline.Trainer(model, ..., progress=False)",
        "track.progress",
        "false",
    ),
    "profile": Meaning(
        "Where the time of the steps goes is measured every split_every steps",
        "paceline.Trainer(model, ..., split_every=50)",
        "track.split_every",
        "50",
    ),
    "memory": Meaning(
        "The memory of a step is measured by measure_memory",
        "paceline.Trainer(model, ..., measure_memory=True)",
        "track.memory",
        "true",
    ),
    "verbs": Meaning(
        "What is done is what is called",
        "trainer.fit(train, epochs=3), trainer.evaluate(test) or trainer.predict(test)",
    ),
}
"""Evaluation, checkpoints, callbacks, and where a run is logged."""
