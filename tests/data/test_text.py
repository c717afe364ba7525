"""Byte windows, the standard library's source, and the unigram bar."""

import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data import ByteText, loader, stdlib_source, unigram_loss
from paceline.errors import DataError


def test_windows_cover_the_text_once_and_targets_follow_by_one() -> None:
    text = ByteText(b"abcdefgh", context=3)
    assert len(text) == 2
    items = [(bytes(x.tolist()), bytes(y.tolist())) for x, y in (text[0], text[1], text[-1])]
    assert items == [(b"abc", b"bcd"), (b"def", b"efg"), (b"def", b"efg")]
    assert text[0][0].dtype == text[0][1].dtype == torch.int64
    with pytest.raises(IndexError):
        text[2]


@pytest.mark.parametrize(
    "data",
    [
        b"0123456",
        bytearray(b"0123456"),
        memoryview(b"0123456"),
        torch.tensor(list(b"0123456"), dtype=torch.uint8),
    ],
)
def test_any_bytes_will_do(data: Any) -> None:
    (batch,) = loader(ByteText(data, 3), global_batch=2, shuffle=False, rank=0, size=1)
    assert batch[0].tolist() == [list(b"012"), list(b"345")]
    assert batch[1].tolist() == [list(b"123"), list(b"456")]


def test_the_standard_library_is_split_by_file() -> None:
    train, val = stdlib_source(context=64)
    again = stdlib_source(context=64)
    assert torch.equal(train.data, again[0].data)
    assert torch.equal(val.data, again[1].data)
    total = train.data.numel() + val.data.numel()
    assert total > 2_000_000
    assert 0.05 <= val.data.numel() / total < 0.1
    in_val = bytes(val.data.tolist())
    in_train = bytes(train.data.tolist())
    where = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "ast.py", "dataclasses.py", "difflib.py", "inspect.py"):
        source = (where / name).read_bytes()
        assert (source in in_train) != (source in in_val)


def test_max_bytes_limits_the_text() -> None:
    train, val = stdlib_source(context=32, max_bytes=300_000, val_fraction=0.2)
    assert train.data.numel() + val.data.numel() == 300_000
    assert 60_000 <= val.data.numel() < 200_000
    assert len(train) == (train.data.numel() - 1) // 32


def test_unigram_loss() -> None:
    train = ByteText(b"aaab" * 1000, 4)
    val = ByteText(b"xabaa", 4)  # the first byte is context, not a target
    # Add-one smoothing over 256 byte values.
    a, b = math.log(3001 / 4256), math.log(1001 / 4256)
    assert unigram_loss(train, val) == pytest.approx(-(3 * a + b) / 4)
    uniform = ByteText(bytes(range(256)) * 20, 16)
    assert unigram_loss(uniform, uniform) == pytest.approx(math.log(256), abs=1e-3)
    source = stdlib_source(max_bytes=400_000)
    assert 2.5 < unigram_loss(*source) < 3.8


CONTEXT = "must be a whole number, 1 or more: it is the length of a window in bytes."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ByteText("text", 4),
            "the text is a str: give bytes or a torch.uint8 tensor. For a str, say text.encode().",
        ),
        (
            lambda: ByteText(torch.zeros(9), 4),
            "the text is a 1-dimensional torch.float32 tensor: give a one-dimensional torch.uint8 "
            "tensor of bytes.",
        ),
        (lambda: ByteText(b"text", 0), f"context=0 {CONTEXT}"),
        (lambda: stdlib_source(context=1.5), f"context=1.5 {CONTEXT}"),
        (
            lambda: ByteText(b"text", 4),
            "context=4 needs a text of at least 5 bytes, but this one has 4. Take a shorter "
            "context or a longer text.",
        ),
        (
            lambda: ByteText(b"", 1),
            "context=1 needs a text of at least 2 bytes, but this one has 0. Take a shorter "
            "context or a longer text.",
        ),
        (
            lambda: stdlib_source(val_fraction=1.0),
            "val_fraction=1.0 must lie between 0 and 1: it is the part of the text kept for "
            "validation.",
        ),
        (
            lambda: stdlib_source(context=128, max_bytes=100),
            "max_bytes=100 must be a whole number, 516 or more: it is the most bytes to read, "
            "enough for four windows.",
        ),
    ],
)
def test_wrong_calls(call: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == message


def test_a_python_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError) as caught:
        stdlib_source()
    assert str(caught.value) == (
        f"no Python source found in {tmp_path}: this Python was installed without it (zipped or "
        "stripped). Use a Python with its standard library's .py files, or another dataset."
    )
    (tmp_path / "one.py").write_bytes(b"x = 1\n" * 100)
    with pytest.raises(DataError, match=r"comes to 600 bytes in 1 files: too little to split"):
        stdlib_source()
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "skipped.py").write_bytes(b"y = 2\n" * 1000)
    (tmp_path / "two.py").write_bytes(b"z = 3\n" * 100)
    train, val = stdlib_source(val_fraction=0.5)
    assert {bytes(train.data[:1].tolist()), bytes(val.data[:1].tolist())} == {b"x", b"z"}
