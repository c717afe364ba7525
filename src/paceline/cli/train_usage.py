"""What people get wrong in ``paceline train``, and what they meant."""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from paceline.cli.other_launchers import names_process_group, translate, with_our_names

_CONFIGS = (".yaml", ".yml", ".json")


class TrainCommand(TyperCommand):
    """The command, with an answer to options that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``; an unknown option is a ConfigError that says where it belongs."""
        args = with_our_names(args)
        given = list(args)
        if names_process_group(given):
            own, after = _split_at(given, _script_in(given))
            if names_process_group(own):
                from paceline.errors import ConfigError

                raise ConfigError(translate(own).answer(after))
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Which module of which package defines click's errors depends on typer's version.
            option = getattr(error, "option_name", None)
            if option is None or not hasattr(error, "possibilities"):
                raise
            from paceline.errors import ConfigError

            raise ConfigError(_unknown(option, given, self._options())) from None

    def _options(self) -> list[str]:
        return [name for parameter in self.params for name in parameter.opts if name[:2] == "--"]


def _unknown(option: str, args: Sequence[str], known: Sequence[str]) -> str:
    """What to say of ``option``, which the command does not have."""
    from paceline.compat.horovod.runner.arguments import is_horovodrun, read_horovodrun
    from paceline.config.keys import FIELDS, nearest, section_of, suggest
    from paceline.options.habits import habit_of

    if is_horovodrun(args):
        return read_horovodrun(args).answer()
    script = _script_in(args)
    own, after = _split_at(args, script)
    if (found := translate(own)).typed:
        return found.answer(after)
    if script is not None:
        rest = [arg for arg in args if arg not in ("--script", script, f"--script={script}")]
        ours = rest[: _index(rest, option)]
        theirs = rest[len(ours) :]
        command = ["paceline", "train", *ours, "--script", script, "--", *theirs]
        return (
            f"{option}: no such option of paceline train; arguments of the script go after --, as "
            f"in: {shlex.join(command)}"
        )
    if (habit := habit_of(option)) is not None:
        if told := habit.meaning.on_command_line:
            return f"{option}: no such option; here that is: {told}"
        return f"{option}: no such option. {habit.meaning.sentence().rstrip('.')}"
    near = nearest(option.lstrip("-"), [name.lstrip("-").replace("-", "_") for name in known])
    if near is not None:
        return f"{option}: no such option; did you mean --{near.replace('_', '-')}?"
    key = suggest((), option.lstrip("-"))
    if key is not None and (key not in FIELDS or section_of(FIELDS[key]) is None):
        return f"{option}: no such option; a value of the config is set by --set {'.'.join(key)}=…"
    return (
        f"{option}: no such option; there are {', '.join(known)}. Any value of the config is set "
        "by --set key=value"
    )


def _split_at(args: Sequence[str], script: str | None) -> tuple[list[str], list[str]]:
    """The options of the launcher, and a script that stands in place of a config with its own."""
    args = list(args)
    if script is not None and script in args and args[args.index(script) - 1] != "--script":
        place = args.index(script)
        theirs = args[place + 1 :]
        return args[:place], ["--script", script, *(["--", *theirs] if theirs else [])]
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end:]


def _script_in(args: Sequence[str]) -> str | None:
    """The script that a command line names, by ``--script`` or in place of a config."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if arg == "--script":
            return following
        if arg.startswith("--script="):
            return arg.partition("=")[2]
    scripts = [arg for arg in args if arg.endswith(".py") and os.path.isfile(arg)]
    return next((arg for arg in scripts if script_problem(arg) is None and _is_script(arg)), None)


def _is_script(path: str) -> bool:
    from paceline.config.python_file import may_define_config

    try:
        return not may_define_config(ast.parse(Path(path).read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _index(args: Sequence[str], option: str) -> int:
    return next(i for i, arg in enumerate(args) if arg.partition("=")[0] == option)


def script_problem(script: str) -> str | None:
    """Why ``script`` cannot be run on ranks, known before any is started; else ``None``."""
    path = Path(script)
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return None
        return "is a folder without a __main__.py; name the script in it"
    if not path.exists():
        return f"there is no such file{_near(path)}"
    if not path.is_file():
        return "is not a file that several ranks can read"
    if path.suffix in _CONFIGS:
        return f"that is a config; train it with: paceline train {shlex.quote(script)}"
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if content.startswith(b"PK") or path.suffix == ".pyc":  # an archive, or compiled
        return None
    try:
        ast.parse(content, filename=script)
    except SyntaxError as error:
        return f"not valid Python, line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"not valid Python: {error or 'nested too deeply to read'}"
    return None


def _near(path: Path) -> str:
    from paceline.config.keys import nearest

    try:
        there = [item.name for item in path.parent.iterdir() if item.suffix == ".py"]
    except OSError:
        return ""
    near = nearest(path.name, there, 0.6)
    return f"; did you mean '{path.parent / near}'?" if near else ""


def resume_problem(folder: str) -> str | None:
    """Why ``--resume`` cannot go on with ``folder`` where that is a file; else ``None``."""
    path = Path(folder)
    if not path.is_file():
        return None
    for above in (path.parent, path.parent.parent):
        if (above / "config.yaml").is_file() and (above / "events.jsonl").is_file():
            return f"is a file of a run; name the run's folder: --resume {shlex.quote(str(above))}"
    if path.suffix in (*_CONFIGS, ".py"):
        return (
            "is a config, not the folder of a run; to start a run with it: paceline train "
            f"{shlex.quote(folder)}"
        )
    return None  # the run's folder itself says what it takes
