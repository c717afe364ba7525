"""``--resume auto``: a command that is safe to repeat, as schedulers do that requeue jobs.

It starts a run where there is none, and goes on with the one that is there. What decides a run's
results (model, data, optimizer, batch, seed, …) must be as the run has it: an edited config or
another ``--set`` is refused, naming the keys, since nobody may be there who meant it. Where and how
it is run (``launch``, ``layout``, ``track``, ``hangs``) is taken from the command: the machines may
be others.
"""

from __future__ import annotations

import shlex
from typing import Any

from paceline.cli.train_report import is_finished
from paceline.cli.train_request import TrainRequest
from paceline.config import Config, load, resolve
from paceline.config.keys import flat
from paceline.errors import ConfigError
from paceline.launch.run_folder import RunFolder
from paceline.masking import shown

_HOW_IT_IS_RUN = ("launch", "layout", "track", "hangs", "name", "tags", "code")
_MOST_KEYS = 8


def config_to_go_on_with(request: TrainRequest, asked: Config, run: RunFolder) -> Config | None:
    """The config with which the run in ``run`` goes on; ``None`` if it is finished (said so).

    ``asked`` is the config of the command, not yet resolved.
    """
    stored = check_same(request, asked, run)
    now = resolve(asked)
    # The batch stays what it was, whatever number of ranks there is now.
    config = stored.model_copy(update={name: getattr(now, name) for name in _HOW_IT_IS_RUN})
    return None if is_finished(run, stored, config) else config


def check_same(request: TrainRequest, asked: Config, run: RunFolder) -> Config:
    """The config of the run; refuses a command whose config is another."""
    stored = load(run.config)
    ranks = {"nproc": stored.launch.nproc, "nnodes": stored.launch.nnodes}
    launch = asked.launch.model_copy(update=ranks)
    then = resolve(asked.model_copy(update={"launch": launch, "layout": stored.layout}))
    has, wants = _compared(stored), _compared(then)
    keys = sorted(key for key in {**has, **wants} if has.get(key) != wants.get(key))
    if not keys:
        return stored
    listed = [f"{key}: {_text(has, key)} -> {_text(wants, key)}" for key in keys[:_MOST_KEYS]]
    more = [f"and {len(keys) - _MOST_KEYS} more"] if len(keys) > _MOST_KEYS else []
    folder = shlex.quote(str(request.run_dir))
    change = [f"--set {shlex.quote(f'{key}={_text(wants, key)}')}" for key in keys if key in wants]
    raise ConfigError(
        f"--resume auto: the run in {run} has another config than this command: "
        f"{'; '.join([*listed, *more])}. To go on with it as it is: paceline train --resume "
        f"{folder}; to change it: paceline train --resume {folder} "
        f"{' '.join(change[:_MOST_KEYS]) or '--set key=value'}; for a new run, name another "
        "--run-dir."
    )


def _compared(config: Config) -> dict[str, Any]:
    values = config.model_dump()
    found = flat({name: value for name, value in values.items() if name not in _HOW_IT_IS_RUN})
    return {key: value for key, value in found.items() if value != {}}


def _text(values: dict[str, Any], key: str) -> str:
    return str(shown(values[key], key.rpartition(".")[2])) if key in values else "not set"
