"""Credentials are named, not written: no message, file, tracker or repr shows one."""

from __future__ import annotations

import os
import pickle
import stat
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline.checkpoint.storage.remote import FsspecStorage
from paceline.cli.train_nodes import asked_of
from paceline.config import Config, Secret, check, dump, json_schema, load
from paceline.config.keys import flat
from paceline.credentials import revealed
from paceline.errors import CheckpointError, ConfigError
from paceline.launch.run_folder import RunFolder
from paceline.masking import masked, says_secret, shown
from paceline.options import Checkpointing

PASSWORD = "hunter2-do-not-tell"


@pytest.fixture
def private_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    return file


def storage(**options: Any) -> dict[str, Any]:
    return {"checkpoint": {"where": "s3://bucket/run", "storage": options}}


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(source, overrides)
    text = "".join(traceback.format_exception(refused.value))
    assert PASSWORD not in text
    return str(refused.value)


class TestSecret:
    def test_a_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_TEST_SECRET", PASSWORD)
        assert Secret("env:PACELINE_TEST_SECRET").reveal() == PASSWORD
        monkeypatch.delenv("PACELINE_TEST_SECRET")
        with pytest.raises(ConfigError, match="PACELINE_TEST_SECRET is not set; export it"):
            Secret("env:PACELINE_TEST_SECRET").reveal()

    def test_a_file_without_its_last_line_end(self, private_file: Path) -> None:
        assert Secret(f"file:{private_file}").reveal() == PASSWORD

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
    def test_a_file_that_others_reach_is_refused(self, private_file: Path, mode: int) -> None:
        private_file.chmod(mode)
        with pytest.raises(ConfigError, match=f"{mode:04o}.*run: chmod 600 {private_file}"):
            Secret(f"file:{private_file}").reveal()

    def test_what_is_no_file_is_refused_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo", 0o600)
        for path, why in (
            (tmp_path / "fifo", "is a pipe"),
            (tmp_path, "is a folder"),
            (tmp_path / "none", "No such file"),
            ("/dev/zero", "is a device"),
        ):
            with pytest.raises(ConfigError, match=why):
                Secret(f"file:{path}").reveal()

    def test_a_file_of_any_size_or_bytes_is_refused(self, private_file: Path) -> None:
        for content, why in ((b"", "empty"), (b"x" * 70_000, "65,536"), (b"\xff", "UTF-8")):
            private_file.write_bytes(content)
            with pytest.raises(ConfigError, match=why):
                Secret(f"file:{private_file}").reveal()

    @pytest.mark.parametrize(
        "text", ["env:", "env:1A", "env:A B", "file:", "file:relative", "file:///x", PASSWORD, ""]
    )
    def test_anything_else_is_refused_unrepeated(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"env:|file:") as refused:
            Secret(text)
        assert PASSWORD not in str(refused.value)

    def test_it_shows_its_reference_or_nothing(self) -> None:
        named, given = Secret("env:A"), Secret.of(PASSWORD)
        assert (repr(named), str(named), f"{named}") == ("Secret('env:A')", "env:A", "env:A")
        assert (repr(given), str(given), given.reveal()) == ("Secret(***)", "***", PASSWORD)
        assert pickle.loads(pickle.dumps(named)) == named

    def test_as_a_key_of_a_schema(self) -> None:
        class Section(BaseModel):
            key: Secret | None = None

        section = Section(key="env:A")  # type: ignore[arg-type]
        assert section.key == Secret("env:A")
        assert section.model_dump() == {"key": "env:A"}
        assert section.model_dump_json() == '{"key":"env:A"}'
        assert Section.model_json_schema()["properties"]["key"]["anyOf"][0]["type"] == "string"
        for wrong in (5, Secret.of(PASSWORD)):
            with pytest.raises(ValidationError, match="env:NAME"):
                Section(key=wrong)  # type: ignore[arg-type]


SECRET_OPTIONS: list[dict[str, Any]] = [
    {"secret": PASSWORD},
    {"key": PASSWORD},
    {"token": PASSWORD},
    {"password": 123456},
    {"account_key": PASSWORD},
    {"connection_string": f"AccountKey={PASSWORD}"},
    {"client_kwargs": {"aws_secret_access_key": PASSWORD}},
    {"client_kwargs": {"headers": {"Authorization": f"Bearer {PASSWORD}"}}},
    {"auth": ["user", PASSWORD]},
    {"credentials": {"anything": PASSWORD}},
    {"endpoint_url": f"http://user:{PASSWORD}@127.0.0.1:9000"},
    {"anything": "AKIAABCDEFGHIJKLMNOP"},
]


class TestConfigs:
    @pytest.mark.parametrize("options", SECRET_OPTIONS, ids=lambda options: next(iter(options)))
    def test_a_literal_is_refused_unrepeated(self, options: dict[str, Any], tmp_path: Path) -> None:
        assert "env:NAME" in refusal(storage(**options))
        file = tmp_path / "c.yaml"
        file.write_text(dump(Config()) + "\n")
        overrides = [f"checkpoint.storage={options}", "checkpoint.where=s3://bucket/run"]
        assert (
            f"--set checkpoint.storage=***: checkpoint.storage: {next(iter(options))}"
            in refusal(file, *overrides)
        )
        with pytest.raises(ValidationError) as refused:
            Config(checkpoint={"storage": options})  # type: ignore[arg-type]
        assert PASSWORD not in str(refused.value)
        assert PASSWORD not in repr(refused.value)

    def test_the_words(self) -> None:
        assert refusal(storage(secret=PASSWORD)) == (
            "checkpoint.storage: secret is a credential itself; a config is kept and shown, so "
            "instead write env:NAME for a variable of the environment, or file:/path for a file "
            "that you alone can read (chmod 600)"
        )

    @pytest.mark.parametrize(
        "override",
        [
            f"checkpoint.storage.secret={PASSWORD}",
            f"checkpoint.storge.secret={PASSWORD}",
            f"checkpoint.storage={PASSWORD}",
            f"checkpoint.storage={{secret: {PASSWORD}",
            f"checkpoint={{storage: {{secret: {PASSWORD}}}}}",
            f"checkpoint.storage.secret=!!int {PASSWORD}",
            f"data.args.password={PASSWORD}",
            f"checkpoint.digest_key={PASSWORD}",
            f"checkpoint={{digest_key: {PASSWORD}}}",
            f"track.mlflow.uri=https://me:{PASSWORD}@host",
            f"checkpoint.where=ftp://me:{PASSWORD}@host/x",
            f"checkpoint.start_from=https://host/x?X-Amz-Signature={PASSWORD}",
        ],
    )
    def test_an_override_is_not_repeated(self, override: str) -> None:
        assert "***" in refusal(None, override)

    def test_urls_say_where_the_credential_belongs(self) -> None:
        text = refusal({"track": {"mlflow": {"uri": f"https://me:{PASSWORD}@host/x"}}})
        assert text.startswith("track.mlflow.uri: holds a credential, 'https://me:***@host/x'")
        assert "MLFLOW_TRACKING_PASSWORD" in text
        text = refusal({"checkpoint": {"where": f"ftp://me:{PASSWORD}@host/x"}})
        assert "checkpoint.storage, as env:NAME or file:/path" in text

    def test_references_are_kept_as_they_are(self, private_file: Path) -> None:
        config = load(storage(secret=f"file:{private_file}", key="env:SOME_KEY", anon=False))
        again = load({"checkpoint": config.checkpoint.model_dump()})
        assert again.checkpoint.storage == config.checkpoint.storage
        for text in (dump(config), repr(config), str(asked_of(flat(config.model_dump())))):
            assert PASSWORD not in text
            assert "env:SOME_KEY" in text
        assert json_schema()

    def test_ordinary_options_and_arguments_pass(self) -> None:
        load(storage(anon=True, endpoint_url="http://[::1]:9000/a@b", profile="work", token="anon"))
        tokens = {"pad_token": "<pad>", "max_tokens": 5, "key": "image", "path": "s3://b:80/x@1"}
        load({"data": {"target": "data:make", "args": tokens}})

    def test_check_tells_of_references_that_lead_nowhere(self, private_file: Path) -> None:
        private_file.chmod(0o644)
        config = load(
            {
                **storage(secret=f"file:{private_file}", key="env:PACELINE_NOT_SET"),
                "track": {"mlflow": {"uri": "env:PACELINE_NOT_SET"}},
                "model": {"args": {"api_key": "env:PACELINE_NOT_SET"}},
            },
            ["checkpoint.digest=blake2b", "checkpoint.digest_key=env:PACELINE_NOT_SET"],
        )
        problems = "\n".join(check(config, devices=0))
        assert f"checkpoint.storage: file:{private_file}: others than its owner" in problems
        assert "checkpoint.storage: env:PACELINE_NOT_SET: the variable" in problems
        assert "track.mlflow.uri: env:PACELINE_NOT_SET: the variable" in problems
        assert "model.args: env:PACELINE_NOT_SET: the variable" in problems
        assert "checkpoint.digest_key: env:PACELINE_NOT_SET: the variable" in problems


class TestShowing:
    def test_what_a_url_or_a_text_tells(self) -> None:
        for text, expected in (
            ("see s3://K:s/e+c@bucket/x now", "see s3://K:***@bucket/x now"),
            ("postgresql://me:p@ss@db:5432/m", "postgresql://me:***@db:5432/m"),
            ("http://h/x?a=1&sig=abc%2F&b=2", "http://h/x?a=1&sig=***&b=2"),
            ("http://h:80/x@y and a:b@c", "http://h:80/x@y and a:b@c"),
            ("http://h:80", "http://h:80"),
            ("Authorization: Bearer abcdefghijkl", "Authorization: Bearer ***"),
        ):
            assert masked(text) == expected

    def test_names(self) -> None:
        secret = "secret aws_secret_access_key accountKey X-Api-Key hf_token token sas_token Cookie"
        harmless = "key pad_token max_tokens key_filename password_file monkey author secretary"
        assert [name for name in secret.split() if not says_secret(name)] == []
        assert [name for name in harmless.split() if says_secret(name)] == []

    def test_settings_of_a_users_own_code(self) -> None:
        settings = {"storage": {"key": "a", "anon": True, "headers": {"Cookie": "b"}}, "lr": 0.1}
        assert shown(settings) == {
            "storage": {"key": "***", "anon": True, "headers": {"Cookie": "***"}},
            "lr": 0.1,
        }
        assert PASSWORD not in repr(Checkpointing(storage={"secret": PASSWORD}))

    def test_config_yaml_is_its_owners_alone(self, tmp_path: Path) -> None:
        run = RunFolder(tmp_path)
        run.config.write_text("name: old\n")  # as an earlier version wrote it
        run.config.chmod(0o644)
        before = os.umask(0)
        try:
            run.save_config("name: new\n")
        finally:
            os.umask(before)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("*.yaml")}
        assert modes == {"config.yaml": 0o600, "config-1.yaml": 0o600}


class TestStorage:
    def test_references_are_read_when_a_store_is_opened(
        self, private_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PACELINE_TEST_KEY", "the key")
        options = {"key": "env:PACELINE_TEST_KEY", "deep": [{"secret": f"file:{private_file}"}]}
        assert revealed(options) == {"key": "the key", "deep": [{"secret": PASSWORD}]}
        assert revealed({"path": "env:A"}, everywhere=False) == {"path": "env:A"}

    def test_errors_of_client_libraries_do_not_tell_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PACELINE_TEST_SECRET", PASSWORD)

        def fail(*_: Any, **options: Any) -> None:
            raise ValueError(f"bad options {options}")

        store = FsspecStorage("memory://x", {"secret": "env:PACELINE_TEST_SECRET"})
        monkeypatch.setattr(type(store.fs), "cat_file", lambda *_, **__: fail(secret=PASSWORD))
        with pytest.raises(CheckpointError) as failed:
            store.read_range("a", 0, 1)
        text = "".join(traceback.format_exception(failed.value))
        assert "bad options {'secret': '***'}" in text
        assert PASSWORD not in text
        monkeypatch.setattr("fsspec.url_to_fs", fail)
        for options in ({"secret": "env:PACELINE_TEST_SECRET"}, {"secret": PASSWORD}):
            with pytest.raises(CheckpointError) as failed:
                FsspecStorage("memory://x", options)
            assert PASSWORD not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize("piece", ["://x:", "-eyJ", "://", "&key=", "Bearer ", "eyJ.", "://x:@"])
def test_masking_takes_no_square_of_the_length(piece: str) -> None:
    """Measured in processor time of a text that a received config may hold."""
    text = piece * (100_000 // len(piece))
    begun = time.process_time()
    masked(text)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "url", ["https://0123456789abcdef01234567@host/x", "https://me:pass@host/x"]
)
def test_tokens_in_place_of_a_user_are_masked(url: str) -> None:
    assert "***@host/x" in masked(url)
    assert masked("ssh://git@host/repository") == "ssh://git@host/repository"
