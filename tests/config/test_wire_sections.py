"""Short forms of ``compress`` and ``local_steps``, and how they are switched off."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Config, check, dump, load, load_checked


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, *overrides: str) -> Config:
    Path("c.yaml").write_text(text)
    return load("c.yaml", overrides)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("compress: int8\n", "compress: {format: int8}\n"),
        ("local_steps: 50\n", "local_steps: {every: 50}\n"),
    ],
)
def test_one_value_stands_for_a_whole_section(short: str, full: str) -> None:
    meant = written(full)
    assert meant != Config()
    assert written(short) == meant == load(None, [short.strip().replace(": ", "=")])
    # It is shown written out.
    Path("shown.yaml").write_text(dump(written(short)))
    assert load("shown.yaml") == meant


def test_single_keys_may_be_laid_over_a_short_form() -> None:
    compress = written("compress: topk:0.1\n", "compress.warmup_steps=5").compress
    assert (compress.format, compress.warmup_steps) == ("topk:0.1", 5)


def test_a_short_form_replaces_what_stood_there() -> None:
    compress = written("compress: {format: topk:0.1, smallest: 8}\n", "compress=fp16").compress
    assert (compress.format, compress.smallest) == ("fp16", 1024)


def test_the_rest_may_stay_where_it_is_switched_off_for_a_run() -> None:
    text = "compress: {format: sign, warmup_steps: 5}\n"
    assert check(written(text, "compress.format=none"), devices=0) == []
    text = "local_steps: {every: 20, exchange: int8}\n"
    assert check(written(text, "local_steps.every=null"), devices=0) == []


def test_a_rule_alone_is_compression_enough() -> None:
    text = 'compress: {smallest: 8, rules: {"blocks.*": int8}}\n'
    assert check(written(text), devices=0) == []


def test_settings_of_what_is_to_be_tried_need_nothing_else() -> None:
    overrides = ["local_steps.exchange=int8", "compress.smallest=8"]
    config = load_checked(None, overrides, devices=0, trying_wire=True)
    assert (config.local_steps.exchange, config.compress.smallest) == ("int8", 8)
