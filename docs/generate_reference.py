"""A MkDocs hook that writes the reference pages from the code, each time the site is built.

The API comes from docstrings (by mkdocstrings), the command line from its own help, config keys
from the JSON Schema, rules and events from their classes. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

import paceline
from paceline.cli.app import app
from paceline.config import json_schema
from paceline.layout import Layout
from paceline.options import EngineOptions, LocalSteps, Pipelining, Reduction, Sharding
from paceline.options.rules import RULES, Combination, check_rules

ROOT = Path(__file__).parent.parent

API = {
    "api-train": (
        "Training",
        "The trainer, the engine, and what they take and return.",
        (
            *("Trainer", "History", "Callback", "EarlyStopping", "WholeSet"),
            *("Engine", "StepResult", "Accelerator", "prepare", "loader", "parameter_groups"),
            *("Checkpoints", "load_weights"),
            *("Checkpointing", "Evaluation", "DataOptions", "verify"),
        ),
    ),
    "api-layout": (
        "Layouts and options",
        "How a model is spread over ranks, and how gradients travel between them.",
        (
            *("Layout", "Sharding", "TensorParallel", "Pipelining", "Recompute"),
            *("ColumnParallelLinear", "RowParallelLinear"),
            *("Compression", "LocalSteps", "Reduction", "EMA"),
        ),
    ),
}
"""Pages of the API by topic. Public names that are on none of them go to the last page."""
OTHERS = "api-world"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those that lie in ``docs/``."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to examples, which lie outside of the site, at what shows them.

    Pages of the gallery have their examples at their end, whole; the others are on one page.
    """
    of_the_gallery = re.compile(r"\((?:\.\./)+(examples/gallery/[\w./]+\.\w+)\)")
    shown = dict.fromkeys(of_the_gallery.findall(markdown))
    markdown = of_the_gallery.sub(lambda link: f"(#{anchor(link[1])})", markdown)
    for path in shown:
        source = (ROOT / path).read_text(encoding="utf-8")
        language = {".py": "python"}.get(Path(path).suffix, Path(path).suffix[1:])
        name = Path(path).name
        markdown += f"\n## {name} {{#{anchor(path)}}}\n\n```{language}\n{source}```\n"
    return re.sub(r"\((?:\.\./)+examples/(\w+)\.py\)", r"(../reference/examples.md#\1py)", markdown)


def anchor(path: str) -> str:
    """Where a page of the gallery shows the file at ``path``."""
    return re.sub(r"\W", "", Path(path).name)


def pages() -> dict[str, str]:
    """Every generated page by its name."""
    return {
        "index": index_page(),
        **api_pages(),
        "cli": cli_page(),
        "config": config_page(),
        "rules": rules_page(),
        "events": events_page(),
        "errors": "# Errors\n\n::: paceline.errors\n    options:\n      show_root_heading: false\n",
        "examples": examples_page(),
    }


def index_page() -> str:
    """What the reference holds."""
    rows = [
        ("[Training](api-train.md)", "`Trainer`, `Engine`, `prepare`, `loader`, checkpoints"),
        ("[Layouts and options](api-layout.md)", "`Layout` and the options of each axis"),
        ("[World](api-world.md)", "processes, groups, collectives"),
        ("[Command line](cli.md)", "every command with its options"),
        ("[Config keys](config.md)", "every key with its type, its default and its meaning"),
        ("[Layout rules](rules.md)", "which combinations are refused, and why"),
        ("[Events](events.md)", "what a run writes to `events.jsonl`"),
        ("[Errors](errors.md)", "the exceptions Paceline raises"),
        ("[Examples](examples.md)", "one short script per feature"),
    ]
    return "# Reference\n\nThese pages are generated from the code.\n\n" + table(
        ("page", "what it has"), rows
    )


MODULES = ("__version__", "errors", "events", "launch")
"""What is public and no name of the reference: ``paceline.launch`` is a package that is called."""


def api_pages() -> dict[str, str]:
    """One page per topic, and one for what is public and on no other."""
    listed = {name for _, _, names in API.values() for name in names}
    public = [name for name in paceline.__all__ if name not in MODULES]
    rest = tuple(name for name in public if name not in listed)
    rest += ("launch.api.launch",)
    topics = {**API, OTHERS: ("World", "The processes of a run, and how they communicate.", rest)}
    return {page: api_page(*topic) for page, topic in topics.items()}


def api_page(title: str, sentence: str, names: tuple[str, ...]) -> str:
    """The docstrings of ``names``, which mkdocstrings fills in."""
    return f"# {title}\n\n{sentence}\n\n" + "\n".join(f"::: paceline.{name}\n" for name in names)


def cli_page() -> str:
    """The help of every command, as ``--help`` prints it."""
    parts = ["# Command line\n\nThis is what `--help` prints for each command."]
    for name, help_text in commands("paceline", get_command(app)):
        level = "#" * min(1 + len(name.split()), 3)
        parts.append(f"{level} {name}\n\n```text\n{help_text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def commands(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """A command and all below it, with the help of each."""
    if getattr(command, "hidden", False):
        return
    context = typer.Context(command, info_name=name, terminal_width=96, max_content_width=96)
    if name != "paceline":
        yield name, command.get_help(context)
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {below}", subcommand)


def config_page() -> str:
    """Every key of a config, section by section."""
    schema = json_schema()
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key, about in keys_of(schema, schema, ""):
        section = key.split(".")[0] if "." in key else "top level"
        sections.setdefault(section, []).append(row_of_key(key, about))
    parts = [
        "# Config keys\n\nSet any of them in a config file, or with `--set key=value`. "
        "The [guide to configs](../guides/config.md) explains them with examples."
    ]
    for section in sorted(sections, key=lambda name: name != "top level"):
        heading = section if section == "top level" else f"`{section}`"
        rows = table(("key", "type", "default", "meaning"), sections[section])
        parts.append(f"## {heading}\n\n{rows}")
    return "\n\n".join(parts) + "\n"


def keys_of(node: Any, schema: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The keys below ``node`` of a JSON Schema; sections are entered, values are given."""
    for name, about in node["properties"].items():
        section = section_of(about, schema)
        if section is None:
            yield prefix + name, about
            # Of a list or mapping of sections, the keys of each.
            items = about.get("items") or about.get("additionalProperties")
            if isinstance(items, dict) and (item := section_of(items, schema)) is not None:
                yield from keys_of(item, schema, f"{prefix}{name}.*.")
        else:
            yield from keys_of(section, schema, f"{prefix}{name}.")


def section_of(about: Any, schema: Any) -> Any:
    """The object with keys of its own that a value refers to, if it does."""
    for choice in (about, *about.get("anyOf", ()), *about.get("allOf", ())):
        if "$ref" in choice:
            found = schema["$defs"][choice["$ref"].rpartition("/")[2]]
            if "properties" in found:
                return found
    return None


def row_of_key(key: str, about: Any) -> tuple[str, ...]:
    """A key as a row of the table."""
    default = code(json.dumps(about["default"])) if "default" in about else ""
    return code(key), type_of(about), default, about.get("description", "")


def type_of(about: Any) -> str:
    """The type of a value, in words."""
    if "anyOf" in about:
        return " or ".join(dict.fromkeys(type_of(choice) for choice in about["anyOf"]))
    if "const" in about:
        return code(json.dumps(about["const"]))
    if "enum" in about:
        return ", ".join(code(str(value)) for value in about["enum"])
    return str(about.get("type", "any"))


def rules_page() -> str:
    """Every rule of a layout, with what an engine says to the simplest request that breaks it."""
    parts = [
        "# Layout rules\n\nEach rule has a name, which the error shows as `[rule: …]`. "
        "Below each rule is the message for one combination that breaks it. `paceline config check`"
        " finds them before any process starts."
    ]
    requests = list(requests_to_try())
    for rule in RULES:
        broken = next(request for request in requests if rule.broken(request))
        try:
            check_rules(broken)
        except paceline.errors.LayoutError as error:
            message = str(error)
        parts.append(f"## {rule.name}\n\n```text\n{message}\n```")
    return "\n\n".join(parts) + "\n"


def requests_to_try() -> Iterator[Combination]:
    """Combinations with one setting, then with two, and so on, so that the simplest come first."""
    settings = [
        *[("layout", Layout.parse(text)) for text in ("cp=2", "replicas=2,dp=2", "dp=2", "tp=2")],
        *[("layout", Layout.parse(text)) for text in ("pp=2", "dp=2,zero=3", "dp=2,zero=3,pp=2")],
        *[
            ("layout", Layout.parse(text))
            for text in ("dp=2,zero=1,tp=2", "dp=4,zero=1,replicas=2")
        ],
        ("pipeline", Pipelining("zbv")),
        ("own_loop", True),
        ("device_map", "auto"),
        ("sharding", Sharding(offload="parameters")),
        ("checkpoint_activations", "selective"),
        ("sharding", Sharding(dtype="bf16")),
        *[("compress", name) for name in ("int8", "powersgd:4")],
        ("reduction", Reduction(bucket_mib="tuned")),
        ("local_steps", LocalSteps()),
        ("sync_batchnorm", True),
        ("ema", 0.999),
    ]
    for size in range(1, 4):
        for chosen in itertools.combinations(settings, size):
            if len({name for name, _ in chosen}) == size:
                values: dict[str, Any] = dict(chosen)
                layout = values.pop("layout", Layout())
                own_loop = values.pop("own_loop", False)
                yield Combination(layout, EngineOptions.of(**values), own_loop)


def events_page() -> str:
    """Every kind of event with its fields."""
    module = griffe.load("paceline.events", search_paths=[str(ROOT / "src")])
    base = module["Event"].attributes
    parts = [
        "# Events\n\nA run writes events to `events.jsonl` in its folder, one JSON object a line. "
        "`kind` names the class below; `time`, in every event, is seconds since 1970. "
        "`paceline.events.read(run)` gives them as objects; see "
        "[Watching a run](../guides/track.md)."
    ]
    for name in paceline.events.Event.kinds:
        event = module[name]
        fields = [
            (code(key), code(type_of_field(value, module)), default_of_field(value))
            for key, value in event.attributes.items()
            if key not in base
        ]
        words = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", event.docstring.value)
        parts.append(f"## {name}\n\n{words}\n\n" + table(("field", "type", "default"), fields))
    return "\n\n".join(parts) + "\n"


def type_of_field(field: Any, module: Any) -> str:
    """The type of an event's field; an alias with a check, like ``Seconds``, is what it checks."""
    name = str(field.annotation)
    alias = module.attributes.get(name)
    checked = re.fullmatch(r"Annotated\[(.+), \w+\]", str(alias.value)) if alias else None
    return checked[1] if checked else name


def default_of_field(field: Any) -> str:
    """The default of an event's field, if it has one."""
    if field.value is None:
        return ""
    made = re.fullmatch(r"field\(default_factory=(\w+)\)", str(field.value))
    return code({"list": "[]", "dict": "{}"}[made[1]] if made else str(field.value))


def examples_page() -> str:
    """The example scripts, whole; their docstrings say how to start them."""
    parts = ["# Examples\n\nThe scripts in `examples/`. The tests run all of them."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(source)) or ""
        parts.append(f"## {path.name}\n\n{docstring.split(chr(10))[0]}\n\n```python\n{source}```")
    return "\n\n".join(parts) + "\n"


def table(head: tuple[str, ...], rows: list[Any]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(in_cell, line)) + " |" for line in lines)


def in_cell(text: str) -> str:
    """Text as it may stand in a cell of a table."""
    outside_code = re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "\\|", text)
    return " ".join(outside_code.split())


def code(text: str) -> str:
    """Text as code."""
    return f"`{text}`"
