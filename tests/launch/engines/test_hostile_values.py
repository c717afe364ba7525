"""10,000 hostile values in every place of a manifest: each is carried as it is, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hostile import hostile_values, read_in_both_ways
from kubernetes_cases import KINDS, NEEDED, documents_of, job_of, pod_of
from pydantic import TypeAdapter, ValidationError

from paceline.config import launch_kubernetes, load
from paceline.errors import ConfigError
from paceline.launch.engines.kubernetes import cluster_name
from paceline.launch.engines.kubernetes_manifest import write

VALUES = hostile_values()
CARRIED = [v for v in VALUES if "\0" not in v and v == v.encode("utf-8", "replace").decode()]
REFUSED = [v for v in VALUES if v not in set(CARRIED)]


def expanded(word: str, variables: dict[str, str]) -> str:
    """What a container gets for a word of its command, by the rule of Kubernetes."""

    def put_in(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", put_in, word)


def placed(value: Any, old: Any, new: Any) -> Any:
    """``value`` with ``new`` in the place of ``old``, wherever that is."""
    if value == old:
        return new
    if isinstance(value, dict):
        return {key: placed(item, old, new) for key, item in value.items()}
    return [placed(item, old, new) for item in value] if isinstance(value, list) else value


def test_there_are_ten_thousand_of_each_sort():
    assert len(set(VALUES)) == 10_000
    assert len(CARRIED) > 8_000
    assert len(REFUSED) > 100
    for part in ("'", '"', "\n", "$(", "`", "../", "\0", "\u2028", "日本"):
        assert any(part in value for value in VALUES)
    assert any(value.startswith("-") for value in VALUES)
    assert max(map(len, VALUES)) >= 70_000


@pytest.mark.parametrize("kind", KINDS)
def test_in_arguments_and_annotations_they_are_carried(kind):
    plain = documents_of(job_of({**NEEDED, "kind": kind}, script=("WORD",), train=("c",)))
    chosen = CARRIED[KINDS.index(kind) :: len(KINDS)]
    found = documents_of(job_of({**NEEDED, "kind": kind}, script=tuple(chosen), train=("c",)))
    command = pod_of(found)["containers"][0]["command"]
    given = [expanded(word, {"PATH": "leaked", "HOME": "leaked"}) for word in command]
    assert given[given.index("--") + 1 :] == chosen
    # Nothing else has changed, in any of the documents.
    before = pod_of(plain)["containers"][0]["command"]
    assert command[: -len(chosen)] == before[:-1]
    assert placed(found, command, "COMMAND") == placed(plain, before, "COMMAND")

    named = {f"example.com/a{number}": value for number, value in enumerate(chosen)}
    noted = documents_of(job_of({**NEEDED, "kind": kind, "annotations": named}, train=("c",)))
    one = {"example.com/a0": "x"}
    bare = documents_of(job_of({**NEEDED, "kind": kind, "annotations": one}, train=("c",)))
    noted.pop("ConfigMap"), bare.pop("ConfigMap")  # which has the settings, as text
    assert next(iter(noted.values()))["metadata"]["annotations"] == named
    assert placed(noted, named, "HERE") == placed(bare, one, "HERE")


def test_in_a_config_they_are_carried(tmp_path):
    args = {f"k{number}": value for number, value in enumerate(CARRIED[::8])}
    variables = {f"V{number}": value for number, value in enumerate(CARRIED[3::24])}
    job = job_of(env=variables)
    model = job.config.model.model_copy(update={"args": args})
    object.__setattr__(job, "config", job.config.model_copy(update={"model": model}))
    text = documents_of(job)["ConfigMap"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8", newline="")
    read = load(tmp_path / "config.yaml")
    assert read.model.args == args
    assert read.launch.env == variables
    assert read.optimizer == job.config.optimizer
    assert read.checkpoint == job.config.checkpoint


@pytest.mark.parametrize("value", REFUSED[:8], ids=range(8))
def test_what_is_no_text_is_refused(value):
    with pytest.raises(ConfigError, match="without NUL"):
        documents_of(job_of(script=(value,)))


def test_what_is_no_text_is_refused_anywhere():
    for value in REFUSED:
        with pytest.raises(ConfigError, match="without NUL"):
            write([{"a": [{"b": value}]}])


def test_as_keys_and_values_of_yaml():
    document = {value: [value, {"x": value}] for value in CARRIED[::4] if len(value) <= 100}
    for found in read_in_both_ways(write([document])):
        assert found == [document]


_NAMES = {
    "Name": r"[a-z0-9.-]+",
    "RunName": r"[a-z][a-z0-9-]*",
    "Namespace": r"[a-z0-9-]+",
    "Key": r"[A-Za-z0-9./_-]+",
    "LabelValue": r"[A-Za-z0-9._-]*",
    "Quantity": r"[0-9.]+[a-zA-Z]{,2}",
    "Image": r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
    "Variable": r"[A-Za-z0-9_]+",
    "SecretKey": r"[A-Za-z0-9._/-]+",
    "Capability": r"[A-Z_]+",
}


def test_names_are_names():
    for kind, pattern in _NAMES.items():
        adapter = TypeAdapter(getattr(launch_kubernetes, kind))
        for value in VALUES:
            try:
                accepted = adapter.validate_python(value)
            except ValidationError:
                continue
            assert re.fullmatch(pattern, accepted), (kind, value)
            assert accepted == value
            assert not accepted.startswith("-")


def test_paths_stay_where_they_are():
    adapter = TypeAdapter(launch_kubernetes.PodPath)
    for value in VALUES:
        try:
            path = adapter.validate_python(value)
        except ValidationError:
            continue
        assert path.startswith("/")
        assert path.isprintable()
        assert ".." not in path.split("/")


def test_whatever_a_folder_is_called_the_cluster_gets_a_name():
    config = job_of()
    names = set()
    folders = {f"/runs/{value.replace('/', '_')}" for value in CARRIED if 0 < len(value) < 200}
    for folder in folders:
        object.__setattr__(config, "run", type(config.run)(folder))
        names.add(cluster_name(config))
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{,38}[a-z0-9])?", name) for name in names)
    assert len(names) > 0.99 * len(folders)
