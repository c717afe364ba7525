"""What only shows when several values are looked at together, before any process starts.

Each group of checks is a generator of (key to blame, text); ``check`` runs them all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath

import paceline.config.demo as demo
from paceline.config.clashes import rule_problems, without_effect
from paceline.config.code import code_folders
from paceline.config.devices import count_gpus
from paceline.config.endpoints import endpoints
from paceline.config.fields import SCHEDULES, node_range
from paceline.config.keys import FIELDS, flat, is_secret
from paceline.config.metric_checks import metric_problems
from paceline.config.named_targets import named_targets
from paceline.config.resolving import most_nodes, nproc_of, on_gpu, world_of
from paceline.config.schema import Config
from paceline.config.sources import Path
from paceline.config.targets import UNKNOWN, Callee, argument_problems, look_up
from paceline.credentials import Secret, references
from paceline.errors import ConfigError, DataError, LayoutError
from paceline.layout import Layout
from paceline.options.checkpointing import is_loss

MOST_RANKS_ON_A_MACHINE = 1024
_BATCH_KEYS = ("global_batch", "per_device_batch", "accumulate", "microbatch")
_RANK_KEYS: tuple[Path, ...] = (("layout",), ("launch", "nproc"))

_EXTRAS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "comet": "comet_ml"}
"""The trackers that are extras, each with the module that it needs."""

Problems = Iterator[tuple[Path, str]]


def check(
    config: Config,
    *,
    devices: int | None = None,
    leaving_out: Iterable[Path] = (),
    trying_wire: bool = False,
) -> list[str]:
    """Every reason why ``config`` cannot run on this machine, one message each; empty when it can.

    Nothing is imported and nothing is written: models, losses and datasets are looked up by
    reading their source. ``devices`` is the number of GPUs, counted on this machine when ``None``.
    What involves a key in ``leaving_out``, whose value is not the user's, is not mentioned.
    ``trying_wire``: compression and local steps are tried whether the config asks for them or not.
    """
    gpus = count_gpus() if devices is None else devices
    callees: dict[str, Callee] = {}
    problems = [
        *_targets(config, callees),
        *_duration(config),
        *_learning_rate(config),
        *node_problems(config),
        *_ranks(config, gpus),
        *_batch(config, gpus),
        *(() if trying_wire else without_effect(config)),
        *_device(config, gpus),
        *metric_problems(config, callees.get("data", UNKNOWN)),
        *_saving(config),
        *_credentials(config),
        *_demo_model(config),
    ]
    broken = [(path, ".".join(path)) for path in leaving_out]
    return config._sources.messages(
        (blamed, text)
        for blamed, text in problems
        if not any(blamed[: len(path)] == path or dotted in text for path, dotted in broken)
    )


def _targets(config: Config, callees: dict[str, Callee]) -> Problems:
    """Import paths that lead nowhere, and arguments that what they lead to does not take."""
    folders = code_folders(config)
    for named in named_targets(config, folders):
        path, section = named.path, named.path[:-1]
        try:
            callee = look_up(named.target, folders)
        except ConfigError as error:
            yield path, f"{'.'.join(path)}: {error}"
            continue
        callees[".".join(section)] = callee
        given = set(named.given)
        if section == ("optimizer",):
            # The parameters come first, whatever the optimizer calls them.
            given = {*(callee.accepts or ())[:1], *callee.needs[:1], "lr", "weight_decay"}
            yield from _optimizer_arguments(config, callee)
        # A loss function, say, gets the model's output and the target at every step.
        later = named.calls_function_later and callee.kind == "function"
        for argument, text in argument_problems(
            callee, named.args, given=given, all_needed=not later
        ):
            where = (*section, "args", argument) if argument else path
            yield where, f"{'.'.join(section)}.args: {named.target} {text}"


def _optimizer_arguments(config: Config, callee: Callee) -> Problems:
    optimizer = config.optimizer
    for name in ("lr", "weight_decay"):
        if name in optimizer.args:
            yield (
                ("optimizer", "args", name),
                f"optimizer.args.{name} is set by optimizer.{name}; give it only there",
            )
    if callee.accepts is None:
        return
    if "lr" not in callee.accepts:
        yield ("optimizer", "name"), f"optimizer.name: {optimizer.target} has no argument 'lr'"
    if optimizer.weight_decay is not None and "weight_decay" not in callee.accepts:
        yield (
            ("optimizer", "weight_decay"),
            f"optimizer.weight_decay={optimizer.weight_decay:g}: {optimizer.target} has no "
            "weight_decay; set it to null",
        )


def _duration(config: Config) -> Problems:
    steps, epochs = config.train.steps, config.train.epochs
    if steps is not None and epochs is not None:
        yield (
            config._sources.culprit(("train", "epochs"), ("train", "steps")),
            f"train.steps={steps} and train.epochs={epochs} are both set; set one of them to null",
        )
    if steps is None and epochs is None:
        yield (
            ("train", "steps"),
            "train.steps and train.epochs are both null; set one of them: how long to train",
        )
    warmup = config.schedule.warmup_steps
    if steps is not None and epochs is None and warmup >= steps:
        yield (
            config._sources.culprit(("schedule", "warmup_steps"), ("train", "steps")),
            f"schedule.warmup_steps={warmup} must be below train.steps={steps}, or the run ends "
            "before it reaches its learning rate; 0 is no warmup",
        )


def _learning_rate(config: Config) -> Problems:
    schedule = config.schedule
    if schedule.args and schedule.name in SCHEDULES:
        yield (
            ("schedule", "args"),
            f"schedule.args are for torch's schedulers and import paths; schedule.name="
            f"{schedule.name} takes warmup_steps and min_ratio",
        )
    for key in ("warmup_steps", "warmup_epochs"):
        length = getattr(schedule, key)
        if length and schedule.name in ("OneCycleLR", "CyclicLR"):
            told = "set it to 0" if key == "warmup_steps" else "leave it out"
            yield (
                ("schedule", key),
                f"schedule.{key}={length:g}: {schedule.name} rises by itself; {told}",
            )
    yield from _counting(config)
    if schedule.lr_scaling != "none" and schedule.reference_batch is None:
        yield (
            ("schedule", "lr_scaling"),
            f"schedule.lr_scaling={schedule.lr_scaling} needs schedule.reference_batch: the "
            f"global batch that optimizer.lr={config.optimizer.lr:g} was chosen for",
        )
    if schedule.lr_scaling == "none" and schedule.reference_batch is not None:
        yield (
            ("schedule", "reference_batch"),
            f"schedule.reference_batch={schedule.reference_batch} has no effect while "
            "schedule.lr_scaling=none; set that to linear or sqrt, or leave this out",
        )


def _counting(config: Config) -> Problems:
    """What a scheduler counts, and in what its warm-up is given."""
    schedule, name = config.schedule, config.schedule.name
    plateau = name == "ReduceLROnPlateau"
    if schedule.every is not None and (name in SCHEDULES or plateau):
        told = "is stepped after each evaluation" if plateau else "goes by steps"
        yield (
            ("schedule", "every"),
            f"schedule.every={schedule.every} is for torch's other schedulers and import paths; "
            f"{name} {told}: leave it out",
        )
    if plateau and schedule.metric is None:
        yield (
            ("schedule", "metric"),
            "schedule.name=ReduceLROnPlateau needs schedule.metric: the validation metric that it "
            "goes by, such as loss",
        )
    elif plateau and "mode" not in schedule.args and not is_loss(schedule.metric or ""):
        yield (
            ("schedule", "metric"),
            f"schedule.metric={schedule.metric}: is a larger one better, or a smaller one? Set "
            "schedule.args.mode to max or min",
        )
    if schedule.metric is not None and not plateau:
        yield (
            ("schedule", "metric"),
            f"schedule.metric={schedule.metric} is for ReduceLROnPlateau; {name} goes by none",
        )
    warmup = "warmup_steps" if schedule.warmup_steps else "warmup_epochs"
    if schedule.warmup_steps and schedule.warmup_epochs is not None:
        yield (
            config._sources.culprit(("schedule", "warmup_epochs"), ("schedule", "warmup_steps")),
            f"schedule.warmup_steps={schedule.warmup_steps} and schedule.warmup_epochs="
            f"{schedule.warmup_epochs:g} both say how long the warm-up is; give one",
        )
    elif plateau and getattr(schedule, warmup):
        yield (
            ("schedule", warmup),
            f"schedule.{warmup}={getattr(schedule, warmup)}: ReduceLROnPlateau has no warm-up; "
            "leave it out, or set it to 0",
        )
    elif schedule.every == "epoch" and schedule.warmup_steps:
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps={schedule.warmup_steps}: {name} counts epochs here; give "
            "warmup_epochs instead",
        )
    elif schedule.every == "epoch" and (schedule.warmup_epochs or 0) % 1:
        yield (
            ("schedule", "warmup_epochs"),
            f"schedule.warmup_epochs={schedule.warmup_epochs:g} must be a whole number where "
            "schedule.every=epoch",
        )


def node_problems(config: Config) -> Problems:
    """Several machines need a place to meet."""
    launch = config.launch
    _, most = node_range(launch.nnodes)
    if launch.rdzv is None:
        if most > 1 and launch.on == "local":
            yield (
                ("launch", "nnodes"),
                f"launch.nnodes={launch.nnodes} needs launch.rdzv, where the machines meet: "
                "--rdzv HOST:PORT, the same on all of them, HOST being one of them",
            )
        return
    try:
        endpoints(launch.rdzv)
    except ValueError as error:
        yield ("launch", "rdzv"), f"launch.rdzv={launch.rdzv!r}: {error}"
        return
    if most == 1:
        yield (
            ("launch", "rdzv"),
            f"launch.rdzv={launch.rdzv!r} is for several machines, but launch.nnodes=1; set it to "
            "their number, or leave rdzv out",
        )


def _ranks(config: Config, gpus: int) -> Problems:
    """The layout against the number of ranks, and the ranks against the GPUs."""
    nproc, nodes, world_size = nproc_of(config, gpus), most_nodes(config), world_of(config, gpus)
    if nproc > MOST_RANKS_ON_A_MACHINE:
        yield (
            config._sources.culprit(*_RANK_KEYS),
            f"{nproc} ranks on one machine are more than {MOST_RANKS_ON_A_MACHINE:,}, the most "
            "that are started; set launch.nproc to the number of its GPUs, or of its CPU cores",
        )
    on_nodes = "" if nodes == 1 else f" on {nodes} machines, {world_size} in all"
    yield from (unsound := list(rule_problems(config, Layout.smallest(config.layout))))
    try:
        layout = Layout.parse(config.layout, world_size=world_size)
    except LayoutError as error:
        if not unsound:  # else no other number of ranks would do
            yield (
                config._sources.culprit(*_RANK_KEYS),
                f"{error} (launch.nproc={config.launch.nproc}{on_nodes})",
            )
    else:
        if layout.world_size != world_size:
            yield (
                config._sources.culprit(*_RANK_KEYS),
                f"layout {config.layout!r} needs {layout.world_size} ranks, but launch.nproc="
                f"{nproc}{on_nodes}; make them agree, or leave one of them at auto",
            )
        if not unsound:
            yield from rule_problems(config, layout)
    if config.launch.device == "cuda" and not gpus:
        yield (
            ("launch", "device"),
            "launch.device=cuda, but torch can use no GPU on this machine; set it to cpu or auto",
        )
    elif on_gpu(config, gpus) and nproc > gpus and not config.launch.share_gpu:
        yield (
            config._sources.culprit(*_RANK_KEYS),
            f"{nproc} ranks need {nproc} GPUs, but this machine has {gpus}; set launch.nproc to "
            f"{gpus} or less, or launch.device to cpu; for a test, launch.share_gpu=true lets "
            "them share",
        )
    if config.launch.share_gpu and (problem := _sharing_problem(config, gpus)):
        yield ("launch", "share_gpu"), f"launch.share_gpu=true {problem}"


def _sharing_problem(config: Config, gpus: int) -> str | None:
    """Why ranks cannot share GPUs, or need not."""
    nproc, nodes = nproc_of(config, gpus), most_nodes(config)
    if config.launch.device == "cpu":
        return "with launch.device=cpu: there is no GPU to share; leave one of them out"
    if not gpus:
        return "needs a GPU, but torch can use none on this machine; leave it out"
    if nodes > 1:
        return (
            f"is for tests on one machine, but launch.nnodes={config.launch.nnodes}; leave it out"
        )
    if nproc <= gpus:
        own = "the rank has a GPU" if nproc == 1 else f"each of {nproc} ranks has a GPU"
        return (
            f"has nothing to do: {own} of its own, of {gpus}; leave it out, set launch.nproc to "
            f"more than {gpus}, or hide GPUs with CUDA_VISIBLE_DEVICES"
        )
    return None


def _batch(config: Config, gpus: int) -> Problems:
    try:
        dp = Layout.parse(config.layout, world_size=world_of(config, gpus)).dp
    except LayoutError:
        return  # said by _ranks
    keys = [("batch", name) for name in _BATCH_KEYS]
    try:
        batch = config.batch.on(dp)
    except DataError as error:
        named = re.sub(rf"\b({'|'.join(_BATCH_KEYS)})\b", r"batch.\1", str(error))
        yield config._sources.culprit(*keys, *_RANK_KEYS), named.removesuffix(".")
        return
    least, most = node_range(config.launch.nnodes)
    if config.batch.sizes.follows_ranks and least != most:
        yield (
            config._sources.culprit(*keys[1:]),
            f"batch.per_device_batch with launch.nnodes={config.launch.nnodes}: the number of "
            "ranks is open, and the batch of a step would be, too; give batch.global_batch, and "
            "batch.microbatch for what goes through the model at once",
        )
    total = batch.global_batch
    if total < dp:
        yield (
            config._sources.culprit(("batch", "global_batch"), *_RANK_KEYS),
            f"batch.global_batch={total} must be at least dp={dp}, or some ranks get no samples",
        )
    micro = config.batch.microbatch
    if micro is not None and micro > total:
        yield (
            config._sources.culprit(("batch", "microbatch"), ("batch", "global_batch")),
            f"batch.microbatch={micro} must be at most batch.global_batch={total}: it is a part "
            "of it",
        )


def _device(config: Config, gpus: int) -> Problems:
    gpu = on_gpu(config, gpus)
    if config.data.pin_memory and not gpu:
        yield (
            ("data", "pin_memory"),
            "data.pin_memory=true needs a GPU, and this run is on the CPU; use null for "
            "'when there is a GPU'",
        )
    compiler = os.environ.get("CXX", "g++").split()
    if config.compile and not gpu and not (compiler and shutil.which(compiler[0])):
        yield (
            ("compile",),
            f"compile=true needs a C++ compiler on the CPU, and {' '.join(compiler)!r} is not "
            "found; install g++, name another in $CXX, or set compile to false",
        )


def _saving(config: Config) -> Problems:
    """Checkpoints that could never be written, and trackers that are not installed."""
    checkpoint, track = config.checkpoint, config.track
    if checkpoint.best is None and checkpoint.mode == "max":
        yield (
            ("checkpoint", "mode"),
            "checkpoint.mode=max has no effect without checkpoint.best; name the metric there",
        )
    if checkpoint.best is None and checkpoint.keep_best > 1:
        yield (
            ("checkpoint", "keep_best"),
            f"checkpoint.keep_best={checkpoint.keep_best} has no effect without checkpoint.best; "
            "name the metric there",
        )
    if checkpoint.storage and "://" not in (checkpoint.where or ""):
        yield (
            ("checkpoint", "storage"),
            "checkpoint.storage is for a checkpoint.where that is a URL, such as s3://bucket/run",
        )
    if checkpoint.digest_key is not None and checkpoint.digest != "blake2b":
        yield (
            ("checkpoint", "digest_key"),
            f"checkpoint.digest={checkpoint.digest} takes no key; set checkpoint.digest to blake2b",
        )
    steps, every = config.train.steps, checkpoint.every
    too_late = every is not None and steps is not None and every > steps
    others = checkpoint.best or checkpoint.epochs_between or checkpoint.every_minutes
    if too_late and not checkpoint.save_at_end and not others:
        yield (
            config._sources.culprit(("checkpoint", "every"), ("train", "steps")),
            f"checkpoint.every={every} is beyond train.steps={steps} and "
            "checkpoint.save_at_end=false: nothing would be saved",
        )
    for name, module in _EXTRAS.items():
        if getattr(track, name) and importlib.util.find_spec(module) is None:
            yield (
                ("track", name),
                f"track.{name}: {module} is not installed; pip install 'paceline[{name}]'",
            )
    yield from _run_dir(track.run_dir)


def _credentials(config: Config) -> Problems:
    """References to credentials that lead nowhere on this machine; what they lead to is let go."""
    named: list[tuple[Path, str]] = [
        *((("checkpoint", "storage"), found) for found in references(config.checkpoint.storage)),
    ]
    for target in named_targets(config):
        found_in = references(target.args, everywhere=False)
        named += [((*target.path[:-1], "args"), found) for found in found_in]
    uri = config.track.mlflow.uri if config.track.mlflow else None
    if uri is not None and uri.startswith("env:"):
        named.append((("track", "mlflow", "uri"), uri))
    values = flat(config.model_dump())
    named += [
        (path, reference)
        for path in FIELDS
        if is_secret(path) and (reference := values.get(".".join(path))) is not None
    ]
    for path, reference in named:
        try:
            Secret(reference).reveal()
        except ConfigError as error:
            yield path, f"{'.'.join(path)}: {error}"


def _run_dir(run_dir: str) -> Problems:
    if run_dir.startswith("~"):
        yield (
            ("track", "run_dir"),
            f"track.run_dir={run_dir!r}: '~' is not expanded; write the whole path",
        )
        return
    folder = FilePath(run_dir)
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not os.path.isdir(folder):
        yield ("track", "run_dir"), f"track.run_dir={run_dir!r}: '{folder}' is a file, not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield (
            ("track", "run_dir"),
            f"track.run_dir={run_dir!r}: the folder '{folder}' may not be written to",
        )


def _demo_model(config: Config) -> Problems:
    """Arguments of the model and the data that come with Paceline, against each other."""
    if config.model.target != demo.MODEL:
        return
    args = config.model.args
    width, heads = args.get("width"), args.get("heads")
    if isinstance(width, int) and isinstance(heads, int) and (heads < 1 or width % heads):
        yield (
            config._sources.culprit(("model", "args", "width"), ("model", "args", "heads")),
            f"model.args.width={width} must be a multiple of model.args.heads={heads}",
        )
    context, length = args.get("context"), config.data.args.get("context")
    if (
        config.data.target == demo.DATA
        and isinstance(context, int)
        and isinstance(length, int)
        and length > context
    ):
        yield (
            config._sources.culprit(("data", "args", "context"), ("model", "args", "context")),
            f"data.args.context={length} must be at most model.args.context={context}, the "
            "longest sequence the model takes",
        )
