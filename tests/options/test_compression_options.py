"""What can be asked of the wire, and what is said to the rest."""

from __future__ import annotations

import pytest

from paceline.errors import TrainingError
from paceline.options import Compression, Form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("none", Form("none")),
        ("INT8", Form("int8")),
        ("topk:0.01", Form("topk", 0.01)),
        ("topk:1e-3", Form("topk", 0.001)),
        ("randomk:0.1+bf16", Form("randomk", 0.1, "bf16")),
        ("powersgd:4+fp16", Form("powersgd", 4, "fp16")),
    ],
)
def test_formats_are_read_and_written(text: str, form: Form) -> None:
    assert Form.parse(text) == form
    assert Form.parse(str(form)) == form


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a format such as"),
        ("zip", "there is no format 'zip'"),
        ("topk", "needs its ratio, as in topk:0.01"),
        ("topk:0", "above 0 and at most 1, as in topk:0.01"),
        ("randomk:1.5", "above 0 and at most 1, as in randomk:0.01"),
        ("powersgd", "needs its rank, as in powersgd:4"),
        ("powersgd:2.5", "whole number"),
        ("powersgd:0", "whole number, 1 or more, as in powersgd:4"),
        ("fp16:2", "takes no number; write fp16 alone"),
        ("int8+fp16", "only topk, randomk, powersgd"),
        ("int8+zip", "only topk, randomk, powersgd"),
        ("topk:0.1+int8", "after + comes fp16 or bf16, as in topk:0.01+fp16"),
        ("zip:3", "there is no format 'zip' (in 'zip:3')"),
        (3, "is not a format"),
    ],
)
def test_others_are_refused_in_words(text, words: str) -> None:
    with pytest.raises(TrainingError, match="compress") as caught:
        Form.parse(text)
    assert words in str(caught.value)


def test_small_tensors_and_vectors_travel_as_they_are() -> None:
    compression = Compression("topk:0.01", smallest=1000)
    assert compression.form_of("norm.weight", (4096,)) == Form("none")
    assert compression.form_of("small.weight", (10, 99)) == Form("none")
    assert compression.form_of("linear.weight", (10, 100)) == Form("topk", 0.01)


def test_options_that_leave_a_tensor_alone_are_named() -> None:
    compression = Compression("topk:0.01", smallest=1000, rules={"a.*": "none", "b.*": "fp16"})
    assert compression.left_alone_by("a.weight", (100, 100)) == "rules"
    assert compression.left_alone_by("b.weight", (4,)) is None
    assert compression.left_alone_by("norm.weight", (4096,)) == "rules"
    assert compression.left_alone_by("small.weight", (10, 99)) == "smallest"
    assert compression.left_alone_by("emb.weight", (99, 99), is_embedding=True) == "embeddings"
    assert compression.left_alone_by("linear.weight", (99, 99)) is None


def test_rules_name_exceptions_and_the_first_one_counts() -> None:
    compression = Compression(
        "powersgd:2", rules={"embedding.*": "none", "*.bias": "fp16", "*": "int8"}
    )
    assert compression.form_of("embedding.weight", (1000, 64)) == Form("none")
    assert compression.form_of("blocks.0.bias", (64,)) == Form("fp16")
    assert compression.form_of("blocks.0.weight", (64, 64)) == Form("int8")


@pytest.mark.parametrize(
    "arguments",
    [
        {"warmup_steps": -1},
        {"warmup_steps": True},
        {"smallest": 1.5},
        {"rules": {"*": "zip"}},
    ],
)
def test_bad_settings_are_refused(arguments) -> None:
    with pytest.raises(TrainingError, match="compress"):
        Compression("fp16", **arguments)


def test_a_rule_is_refused_by_its_pattern_once() -> None:
    with pytest.raises(TrainingError) as caught:
        Compression("fp16", rules={"tokens.*": "Zip"})
    assert str(caught.value).startswith(
        "compress: rule for 'tokens.*': there is no format 'zip'. There are none, fp16,"
    )


def test_a_name_alone_will_do() -> None:
    assert Compression.of("int8") == Compression("int8")
    with pytest.raises(TrainingError, match=r"paceline\.Compression"):
        Compression.of(8)  # type: ignore[arg-type]


def test_steps_of_warm_up_are_for_what_leaves_something_behind() -> None:
    assert [Compression(form).warmup for form in ("none", "fp16", "int8")] == [0, 0, 0]
    assert [Compression(form).warmup for form in ("sign", "topk:0.1", "powersgd:2")] == [100] * 3
    assert Compression("sign", warmup_steps=0).warmup == 0
