"""``paceline checkpoint``: look at, check, compare, convert and clear away checkpoints."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Ema
from paceline.cli.screen import echo

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint import Checkpoint
    from paceline.checkpoint.retention import Keep

app = typer.Typer(
    no_args_is_help=True, help="Look at, check, compare, convert and clear away checkpoints."
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="WHERE", help="A run folder, its checkpoints folder, one checkpoint, or a URL."
    ),
]
Step = Annotated[
    int | None,
    typer.Option(metavar="N", help="That of this step; else the newest.", show_default=False),
]
Best = Annotated[
    bool, typer.Option("--best", help="The best, by the metric that the run kept the best by.")
]
Metric = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="--best: by this metric instead.", show_default=False),
]
BestMode = Annotated[
    str | None,
    typer.Option(
        "--mode", metavar="min|max", help="--best: which value is better.", show_default=False
    ),
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", help="Go where the run's config says, also to other hosts or folders."
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="REF",
        help="Take only what was written with this key: env:NAME or file:/path.",
        show_default=False,
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Whose, where several engines were saved together.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@app.command()
def ls(where: Where, follow: Follow = False, key: Key = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, and its snapshots in this machine's shared memory.

    Each manifest is checked, and whether each file is there; 'verify' reads every byte.
    """
    from paceline.checkpoint.listing import list_checkpoints
    from paceline.cli.checkpoint_list import list_as_json, show_list, snapshots_of

    listed = list_checkpoints(where, follow=follow, key=key)
    snapshots = snapshots_of(where, follow=follow, key=key)
    (list_as_json if as_json else show_list)(where, listed, snapshots)


@app.command()
def show(
    where: Where,
    step: Step = None,
    best: Best = False,
    metric: Metric = None,
    mode: BestMode = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    follow: Follow = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: how it was saved, its tensors, its sizes by group."""
    from paceline.cli.checkpoint_views import show_checkpoint, show_checkpoint_as_json

    checkpoint = _find(where, step, best, metric, mode, follow=follow, key=key)
    if as_json:
        show_checkpoint_as_json(checkpoint)
    else:
        show_checkpoint(checkpoint, tensors)


@app.command()
def verify(
    where: Where,
    step: Step = None,
    best: Best = False,
    metric: Metric = None,
    mode: BestMode = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint of the run.")] = False,
    follow: Follow = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its hash.

    The exit status is 0 when all is as it was saved, 1 when anything is damaged, 2 for a mistake.
    """
    from paceline.checkpoint.locate import find_folder
    from paceline.cli.checkpoint_views import show_checked, verified
    from paceline.errors import CheckpointError

    with _trouble_apart():
        if every:
            folder = find_folder(where, follow=follow, key=key)
            chosen = folder.checkpoints()
            if not chosen:
                raise CheckpointError(f"{folder.where} holds no checkpoint.")
        else:
            chosen = [_find(where, step, best, metric, mode, follow=follow, key=key)]
        found = [verified(checkpoint) for checkpoint in chosen]
        results = [result for result in found if result is not None]
    show_checked(results, as_json)
    if any(result.damages for result in results):
        raise SystemExit(1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a run: its newest.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    step_a: Annotated[
        int | None, typer.Option(metavar="N", help="A's of this step.", show_default=False)
    ] = None,
    step_b: Annotated[
        int | None, typer.Option(metavar="N", help="B's of this step.", show_default=False)
    ] = None,
    best_a: Annotated[bool, typer.Option("--best-a", help="A's best.")] = False,
    best_b: Annotated[bool, typer.Option("--best-b", help="B's best.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Compare what matches alone, like 'model/*'. May be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Differences to list; 0: all.")] = 20,
    follow: Follow = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors and objects of two checkpoints differ, and by how much.

    They may be of different layouts. The exit status is 0 when they are bitwise-identical, 1 when
    they differ, 2 for a mistake. How many seconds a run took (loop/epoch_seconds) does not count.
    """
    from paceline.checkpoint.diff import bytes_to_read, diff_checkpoints
    from paceline.cli.checkpoint_screen import bar
    from paceline.cli.checkpoint_views import show_difference

    with _trouble_apart():
        pair = (
            _find(a, step_a, best_a, follow=follow, key=key),
            _find(b, step_b, best_b, follow=follow, key=key),
        )
        with bar("comparing", bytes_to_read(*pair, only or ())) as move:
            found = diff_checkpoints(*pair, only=only or (), progress=move)
    show_difference(*pair, found, limit, as_json)
    if not found.equal:
        raise SystemExit(1)


@app.command()
def export(
    where: Where,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The file or folder to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors, hf or torch; else as TARGET ends: .safetensors or .pt.",
            show_default=False,
        ),
    ] = None,
    step: Step = None,
    best: Best = False,
    metric: Metric = None,
    mode: BestMode = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Convert floating-point weights, like bfloat16.",
            show_default=False,
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Only this submodule, its names without NAME.", show_default=False
        ),
    ] = "",
    ema: Ema = False,
    engine: EngineName = None,
    hf_config: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="hf: the config.json, or a folder with one.", show_default=False
        ),
    ] = None,
    max_shard: Annotated[
        str, typer.Option(metavar="SIZE", help="hf: the largest file to write.")
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    follow: Follow = False,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint for other programs.

    One safetensors file, a Hugging Face folder (hf), or a state dict of torch's (torch).
    """
    from paceline.checkpoint.weights.export import export_weights, format_for, weights_of
    from paceline.cli.checkpoint_screen import bar, parse_size
    from paceline.cli.checkpoint_views import show_export

    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: what is half-written goes first
    largest = parse_size(max_shard)
    format = format_for(target, format)
    checkpoint = _find(where, step, best, metric, mode, follow=follow, key=key)
    whose: dict[str, Any] = {"weights": "ema" if ema else "model", "engine": engine}
    weights = weights_of(checkpoint, part=part, dtype=dtype, **whose)
    with bar("exporting", sum(weight.bytes for weight in weights)) as move:
        written = export_weights(
            checkpoint,
            target,
            format,
            config=hf_config,
            max_shard=largest,
            part=part,
            dtype=dtype,
            **whose,
            force=force,
            follow=follow,
            progress=move,
        )
    show_export(checkpoint, weights, written, format, as_json)


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .safetensors file, a Hugging Face folder, a torch .pt state dict, or a .pt "
            "checkpoint of Paceline 0.1.",
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A new folder (or URL) of checkpoints.")
    ],
    part: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="They are for this submodule: NAME. before each name.",
            show_default=False,
        ),
    ] = "",
    strip: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", help="Take this off each name, like 'module.'.", show_default=False
        ),
    ] = "",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="Write the checkpoint with this key: env:NAME or file:/path.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint (step 0, the model alone) of weights from elsewhere.

    Nothing in SOURCE is executed; what needs code to be loaded is refused, and what it needs said.
    """
    from paceline.checkpoint.weights.import_weights import import_weights
    from paceline.cli.checkpoint_views import show_import

    show_import(import_weights(source, target, part=part, strip=strip, key=key), as_json)


@app.command()
def prune(
    where: Where,
    keep_last: Annotated[
        int | None, typer.Option(metavar="K", help="Keep the newest K.", show_default=False)
    ] = None,
    keep_best: Annotated[
        int, typer.Option(metavar="K", help="Keep the best K, by --metric.", show_default=False)
    ] = 0,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What is best; else as the run was told.", show_default=False
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="min|max",
            help="Which value of the metric is better; else as the run was told.",
            show_default=False,
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep every step that N divides.", show_default=False),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Free the run's snapshots in shared memory too.")
    ] = False,
    follow: Follow = False,
    key: Key = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that need not stay, and what killed runs left behind.

    Without any --keep option only leftovers go. The newest always stays, and is verified before
    anything is deleted. Refused while a run is using the folder.
    """
    from paceline.cli.checkpoint_prune import run_prune

    looking: dict[str, Any] = dict(follow=follow, key=key)
    keep = _keep(where, keep_last, keep_best, metric, mode, keep_every, looking)
    run_prune(where, keep, looking, memory=memory, dry_run=dry_run, yes=yes, as_json=as_json)


def _find(
    where: str,
    step: int | None,
    best: bool,
    metric: str | None = None,
    mode: str | None = None,
    *,
    follow: bool,
    key: str | None,
) -> Checkpoint:
    """The checkpoint that ``--step``, ``--best`` or neither asks for."""
    from paceline.checkpoint.locate import find_checkpoint
    from paceline.errors import ConfigError

    if best and step is not None:
        raise ConfigError(f"--best and --step {step}: which of them? Leave one out.")
    for option, value in (("--metric", metric), ("--mode", mode)):
        if value is not None and not best:
            raise ConfigError(f"{option} {value} is for --best. Add it, or leave {option} out.")
    which = "best" if best else step
    return find_checkpoint(where, which, metric=metric, mode=mode, follow=follow, key=key)  # type: ignore[arg-type]


def _keep(
    where: str,
    last: int | None,
    best: int,
    metric: str | None,
    mode: str | None,
    every: int | None,
    looking: dict[str, Any],
) -> Keep | None:
    from paceline.checkpoint.best import goal_of
    from paceline.checkpoint.listing import list_checkpoints
    from paceline.checkpoint.retention import Keep
    from paceline.errors import ConfigError

    for option, value in (("--metric", metric), ("--mode", mode)):
        if value is not None and not best:
            raise ConfigError(
                f"{option} {value}: how many are to be kept by it? Add --keep-best K."
            )
    if last is None and not best and every is None:
        return None
    last = 1 if last is None else last
    if not best:
        return Keep(last, every=every)
    infos = [one.info for one in list_checkpoints(where, **looking)]
    goal = goal_of(infos, metric, mode, where)  # type: ignore[arg-type]
    return Keep(last, best, goal.metric, goal.mode, every)


@contextmanager
def _trouble_apart() -> Iterator[None]:
    """For commands whose exit status 1 is an answer: trouble ends with 2, Ctrl-C with 130."""
    from paceline.errors import CheckpointError

    try:
        yield
    except CheckpointError as error:
        echo(error, err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        raise SystemExit(130) from None


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)
