"""Lists and files of hosts: the forms that are read, and what cannot be a host."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launch.hosts import (
    HostSlots,
    common_slots,
    parse_host,
    parse_hosts,
    read_hostfile,
)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node0", HostSlots("node0")),
        ("node0:4", HostSlots("node0", slots=4)),
        ("ada@node1.lan:2", HostSlots("node1.lan", "ada", slots=2)),
        ("node0 slots=4", HostSlots("node0", slots=4)),
        ("node0 slots=4 max_slots=8", HostSlots("node0", slots=4)),
        ("node0 slots=4 max-slots=4", HostSlots("node0", slots=4)),
        ("node0:4 user=ada", HostSlots("node0", "ada", slots=4)),
        ("ssh://ada@node0:2222", HostSlots("node0", "ada", 2222)),
        ("ssh://node0:2222 slots=4", HostSlots("node0", None, 2222, 4)),
        ("10.0.0.1:8", HostSlots("10.0.0.1", slots=8)),
        ("fe80::1%eth0", HostSlots("fe80::1%eth0")),
        ("[2001:db8::1]:4", HostSlots("2001:db8::1", slots=4)),
        ("ssh://ada@[::1]:22", HostSlots("::1", "ada", 22)),
        ("ada@lab@node0", HostSlots("node0", "ada@lab")),
    ],
)
def test_forms_of_a_host(text: str, host: HostSlots) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        *("", "-oProxyCommand=x", "--", "node0:", "node0:0", "node0:x", "node0:99999999", ":4"),
        *("@node0", "-l@node0", "a b@node0", "node0;id", "$(id)", "`id`", "node 0", "node0\\n"),
        *("node0:4:5", "[::1", "[::1]x", "1:2:3:4", "node0 slots=4 slots=5", "node0:4 slots=4"),
        *("node0 slots=4 max_slots=2", "node0 what=1", "node0 slots", "ssh://node0:99999"),
        *("ssh://", "ssh://-x", "nodé", "../x", "a/b", "node0\0", "node-", "fe80::1%-x", "~"),
    ],
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|slots|number|user|known"):
        parse_host(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_a_host_never_looks_like_an_option_or_a_shell_word(text: str) -> None:
    try:
        host = parse_host(text)
    except ValueError:
        return
    for word in (host.name, host.user or "x"):
        assert not word.startswith("-")
        assert word.isascii()
        assert not set(word) & set(" \t\n\0'\"`$\\;&|<>(){}[]*?!#~/")


def test_a_hostfile_of_each_kind(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\nnode0 slots=2  # first\n\n\tnode1:2\nada@node2 slots=2 max_slots=4\r\n")
    hosts = read_hostfile(file)
    assert [str(host) for host in hosts] == ["node0", "node1", "ada@node2"]
    assert common_slots(hosts) == 2
    file.write_text("node0\nnode0\nnode1\nnode1\n")  # a line for each slot, as PBS writes them
    assert [(host.name, host.slots) for host in read_hostfile(file)] == [("node0", 2), ("node1", 2)]
    file.write_text("node0\n-oProxyCommand=id\n")
    with pytest.raises(ValueError, match="line 2"):
        read_hostfile(file)
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match="no host"):
        read_hostfile(file)
    file.write_text("ada@node0\nbob@node0\n")
    with pytest.raises(ValueError, match="two users"):
        read_hostfile(file)


def test_a_list_names_each_host_once_and_slots_agree() -> None:
    with pytest.raises(ValueError, match="named twice"):
        parse_hosts(["node0:2", "node0:2"])
    assert len(parse_hosts(["ssh://node0:22", "ssh://node0:23"])) == 2
    assert common_slots(parse_hosts(["node0", "node1"])) is None
    with pytest.raises(ValueError, match=r"same number of slots.*node0: 2.*node1: no number"):
        common_slots(parse_hosts(["node0:2", "node1"]))
