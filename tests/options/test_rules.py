"""What is said of settings that do not go together; which ones do not is in the rules' own tests."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import Config
from paceline.config.clashes import keys_of_setting
from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.options import EngineOptions, LocalSteps, Reduction
from paceline.options.rules import RULES, Combination, check_rules, layout_in_world


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


def test_what_no_number_of_ranks_would_mend_comes_before_the_number_of_ranks() -> None:
    for layout in ("cp=2", "dp=1,cp=2", "ep=2", "cp=3,ep=2", "tp=2,cp=2"):
        with pytest.raises(LayoutError, match="is not available in this version"):
            layout_in_world(EngineOptions(layout=layout), 1)
    with pytest.raises(LayoutError, match="zero=0 shards nothing"):
        layout_in_world(EngineOptions(layout="dp=2,replicas=2"), 1)
    with pytest.raises(LayoutError, match="needs 4 ranks"):
        layout_in_world(EngineOptions(layout="dp=4"), 2)
    with pytest.raises(LayoutError, match="must divide the world size 1"):
        layout_in_world(EngineOptions(layout="tp=2"), 1)


def test_a_dp_that_is_left_out_is_the_worlds_with_replicas_too() -> None:
    options = EngineOptions(layout="zero=2,replicas=2")
    assert str(layout_in_world(options, 4)) == "dp=4,zero=2,replicas=2"
    assert Layout.smallest("replicas=2,ep=4,cp=2") == Layout(dp=2, replicas=2, cp=2, ep=4)
    with pytest.raises(LayoutError, match="replicas=2 must divide dp=3"):
        layout_in_world(options, 3)
