"""What is said of settings that do not go together; which ones do not is in the rules' own tests."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import Config
from paceline.config.clashes import keys_of_setting
from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.options import EngineOptions, LocalSteps, Reduction
from paceline.options.rules import RULES, Combination, check_rules


def case(layout: Layout, **options: Any) -> Combination:
    return Combination(layout, EngineOptions.of(**options))


def refused(request: Combination) -> str:
    with pytest.raises(LayoutError) as caught:
        check_rules(request)
    return str(caught.value)


def test_the_layout_is_named_where_it_is_part_of_the_reason() -> None:
    told = refused(case(Layout.parse("tp=2"), local_steps=50))
    assert told.startswith("layout 'dp=1,tp=2' does not go with local_steps: tp=2 spreads a model")
    told = refused(case(Layout.parse("cp=2")))
    assert told.startswith("layout 'dp=1,cp=2': cp=2 is not available")


def test_settings_that_clash_on_any_layout_come_without_it() -> None:
    layout = Layout.parse("dp=2")
    told = refused(case(layout, local_steps=50, compress="int8"))
    assert told.startswith("compress int8 does not go with local_steps: compress is about")
    assert "local_steps.exchange" in told
    told = refused(case(layout, local_steps=50, reduction=Reduction(bucket_mib=5)))
    assert told.startswith("reduction bucket_mib=5 does not go with local_steps: reduction is")
    assert "exchange" not in told
    told = refused(case(layout, local_steps=50, sync_batchnorm=True))
    assert told.startswith("sync_batchnorm does not go with local_steps: ")
    told = refused(case(layout, local_steps=50, device_map="auto"))
    assert "[rule: device-map-is-one-process]" in told
    told = refused(case(Layout(), local_steps=50, device_map="auto"))
    assert told.startswith("device_map does not go with local_steps: ")


def test_compression_and_sums_count_where_synchronous_steps_come_first() -> None:
    check_rules(
        case(
            Layout.parse("dp=2"),
            local_steps=LocalSteps(start=5),
            compress="int8",
            reduction=Reduction(bucket_mib=5),
        )
    )


def test_a_config_knows_where_every_setting_of_a_rule_is_said() -> None:
    for rule in RULES:
        for setting in rule.settings:
            keys_of_setting(Config(), setting)
