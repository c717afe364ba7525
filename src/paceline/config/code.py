"""Where the modules that a config names are looked for: beside it, then in the current folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paceline.config.modules import module_file
from paceline.config.named_targets import named_targets
from paceline.config.schema import Config


def code_folders(config: Config) -> list[str]:
    """The folders to look in before those where Python looks, first one first.

    Those in ``code``, where it says any (a relative one is in the config's folder); else the folder
    of the config's file. Then the current folder.
    """
    file = config._sources.origin
    beside = os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
    named = [beside] if config.code is None else [os.path.join(beside, f) for f in config.code]
    return list(dict.fromkeys(os.path.abspath(folder) for folder in (*named, os.getcwd())))


def with_code(config: Config) -> Config:
    """``config`` with ``code`` as the folders that its own modules were found in.

    So that they are found again by a rank or a resume, wherever that is started.
    """
    used = {folders[0] for _, folders in _own_modules(config)}
    code = [folder for folder in code_folders(config) if folder in used]
    return config.model_copy(update={"code": code})


def code_notes(config: Config) -> list[str]:
    """Which file is taken, of modules that several of the folders have."""
    return [
        f"{name} is {module_file(name, folders[0])}, not {module_file(name, folders[1])}"
        for name, folders in _own_modules(config)
        if len(folders) > 1
    ]


def became(config: Config) -> list[str]:
    """One line for each key of a DeepSpeed config: what it is in this config."""
    return list(config._sources.mapped)


def config_notes(config: Config) -> list[str]:
    """What to know of a config before it runs: of its code, and of DeepSpeed's where it has it."""
    return [f"deepspeed: {note}" for note in config._sources.notes] + code_notes(config)


def _own_modules(config: Config) -> Iterator[tuple[str, list[str]]]:
    """Modules that are not installed, each with the folders that have one of its name."""
    folders = code_folders(config)
    for name in dict.fromkeys(
        named.target.partition(":")[0].partition(".")[0] for named in named_targets(config, folders)
    ):
        having = [folder for folder in folders if module_file(name, folder) is not None]
        if having:
            yield name, having
