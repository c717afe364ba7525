"""Hostile values: text that means something to a shell, to YAML, to a path or to an option parser.

``hostile_values()`` gives as many as are wanted, the same ones every time. What is made of a
script, a manifest or a command line either carries such a value unchanged or refuses it with a
``ConfigError``; it never means anything else.
"""

from __future__ import annotations

import random
import re
from typing import Any

import yaml

_SHELL = [
    *("'", '"', "''", '"\'"', "\\", "\\'", "\\\\", "`id`", "$(id)", "${HOME}", "$HOME", "$((1+1))"),
    *(
        "; id",
        "| id",
        "&& id",
        "& id",
        "> /tmp/x",
        "< /etc/passwd",
        "<<EOF",
        "$'\\x41'",
        "!!",
        "!-1",
    ),
    *("*", "?", "[a-z]", "{a,b}", "~", "~root", "#", "a #b", "%n", "%s", "%j", "$$", "$$(PATH)"),
    *("$(PATH)", "$$$(PATH)", "$(", "$)", "$", "'; id; '", '"; id; "', "'$(id)'", "\\$(id)", "a=b"),
    *("=", "IFS=x", "\\\n", "x\\", "\nid\n", "EOF", "EOF\nid", "'\nid\n'", "#SBATCH --uid=0"),
    *("\n#SBATCH --uid=0\n", "#!/bin/sh", "-oProxyCommand=id", "-- -x", ">(id)", "<(id)", "()"),
]
_OPTIONS = ["-", "--", "-x", "-rf", "--help", "--set", "--on=local", "-o", "--kubeconfig=/tmp/x"]
_PATHS = ["..", "../..", "../../etc/passwd", "/etc/passwd", "a/../../b", "./x", "//x", "/", "C:\\x"]
_YAML = [
    *("yes", "No", "on", "OFF", "y", "n", "true", "False", "null", "NULL", "~", "", " ", ".inf"),
    *(".nan", "0", "007", "0x1f", "0o17", "0b11", "1e3", "1_000", "1.0", "1:30", "12:30:45", "+1"),
    *("2020-01-01", "2020-01-01 10:00:00", "=", "<<", "&a", "*a", "!!python/object:os.system"),
    *("!tag", "%YAML 1.1", "---", "...", "\n---\n", "\n...\n", "- a", "? a", ": a", "a: b", "a:b"),
    *("{a: b}", "[a, b]", "{", "}", "[", "]", ",", "@a", "`a", "|", ">", "|-", "# a", "a # b"),
    *(
        "{{x}}",
        "{% x %}",
        "a\n  b: c",
        "a\nkind: Pod",
        "privileged: true",
        "\tx",
        "x\t",
        " x",
        "x ",
    ),
    *("a\r\nb", "\r", "\u0085", "\u2028", "\u2029", "\ufeff", "\x0b", "\x0c", "\x1b[31m", "\x7f"),
]
_UNICODE = [
    *("é", "e\u0301", "日本語", "Ωμέγα", "\U0001f600", "\u202e txt", "\u200b", "\u00a0", "ﬁ", "ß"),
    *("\uff04\uff08id\uff09", "\u2018x\u2019", "\uffff", "\U0010ffff", "İ", "ı", "ſ"),
]
_REFUSED = ["\0", "a\0b", "\ud800", "a\udcffb"]
"""What no argument, no variable and no text can hold: to be refused."""
_LONG = ["a" * 300, "x" * 70_000, "'" * 999, "$(" * 500, "\n" * 200, "é" * 400]

SPECIMENS = [*_SHELL, *_OPTIONS, *_PATHS, *_YAML, *_UNICODE, *_REFUSED, *_LONG]


def hostile_values(count: int = 10_000, seed: int = 0) -> list[str]:
    """``count`` different values: all specimens, then combinations and random characters."""
    chance = random.Random(seed)
    short = [text for text in SPECIMENS if len(text) < 300]
    found = dict.fromkeys(SPECIMENS)
    while len(found) < count:
        parts = chance.choices(short, k=chance.randint(1, 4))
        if chance.random() < 0.3:
            parts.append("".join(map(chr, chance.choices(range(1, 0x250), k=chance.randint(1, 8)))))
        found[chance.choice(["", " ", "\n", "a", "/", "-"]).join(parts)] = None
    return list(found)[:count]


# libyaml's, where PyYAML was built with it: the same, and ten times as fast.
Yaml11: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Yaml12(Yaml11):
    """Reads plain scalars by the core schema of YAML 1.2, as Go's readers (kubectl's) largely do.

    PyYAML's own loaders follow YAML 1.1, where ``1e3`` and ``0o17`` are text and ``yes`` is not.
    """


Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.nan",
}.items():
    Yaml12.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), None
    )


def read_in_both_ways(text: str) -> list[list[Any]]:
    """The documents of a YAML text as readers of YAML 1.1 and of YAML 1.2 see them."""
    return [list(yaml.load_all(text, Loader=loader)) for loader in (Yaml11, Yaml12)]
