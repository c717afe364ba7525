"""What is said of settings that do not go together; which ones do not is in the rules' own tests."""

from __future__ import annotations

import pytest

from paceline.config import Config
from paceline.config.clashes import keys_of_setting
from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.layout.rules import RULES, Request, check_rules


def refused(request: Request) -> str:
    with pytest.raises(LayoutError) as caught:
        check_rules(request)
    return str(caught.value)


def test_the_layout_is_named_where_it_is_part_of_the_reason() -> None:
    told = refused(Request(Layout.parse("tp=2"), local_start=0))
    assert told.startswith("layout 'dp=1,tp=2' does not go with local_steps: tp=2 spreads a model")
    told = refused(Request(Layout.parse("cp=2")))
    assert told.startswith("layout 'dp=1,cp=2': cp=2 is not available")


def test_settings_that_clash_on_any_layout_come_without_it() -> None:
    layout = Layout.parse("dp=2")
    told = refused(Request(layout, local_start=0, compress="int8"))
    assert told.startswith("compress int8 does not go with local_steps: compress is about")
    assert "local_steps.exchange" in told
    told = refused(Request(layout, local_start=0, reduction=("bucket_mib=5",)))
    assert told.startswith("reduction bucket_mib=5 does not go with local_steps: reduction is")
    assert "exchange" not in told
    told = refused(Request(layout, local_start=0, sync_batchnorm=True))
    assert told.startswith("sync_batchnorm does not go with local_steps: ")
    told = refused(Request(layout, local_start=0, device_map=True))
    assert "[rule: device-map-is-one-process]" in told
    told = refused(Request(Layout(), local_start=0, device_map=True))
    assert told.startswith("device_map does not go with local_steps: ")


def test_compression_and_sums_count_where_synchronous_steps_come_first() -> None:
    check_rules(Request(Layout.parse("dp=2"), local_start=5, compress="int8", reduction=("a=1",)))


def test_a_config_knows_where_every_setting_of_a_rule_is_said() -> None:
    for rule in RULES:
        for setting in rule.settings:
            keys_of_setting(Config(), setting)
