"""Two hosts with a shaped link come and go, ranks that fail on them are told of, and the bounds are judged."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from hybridflow.bench import wire
from hybridflow.bench.reshard_ours import assigned
from hybridflow.bench.shaped_link import Host, NoLink, RankFailed, run_ranks, two_hosts
from hybridflow.bench.wire import CASES, LINK, OURS, PACKED, Crossed


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts("100mbit") as made:
            yield made
    except NoLink as error:
        pytest.skip(str(error))


def test_each_host_has_its_end_of_the_link(hosts: tuple[Host, Host]):
    for host in hosts:
        shown = subprocess.run(("ip", "netns", "exec", host.namespace, "ip", "-brief", "addr"), capture_output=True,
                               text=True, check=True).stdout
        assert f"{host.address}/24" in shown
        limits = subprocess.run(("tc", "-n", host.namespace, "qdisc"), capture_output=True, text=True).stdout
        assert "tbf" in limits and "100Mbit" in limits


def test_a_rank_that_fails_is_told_of(hosts: tuple[Host, Host]):
    run_ranks(hosts, 1, "platform", [], timeout_s=60)
    with pytest.raises(RankFailed, match="(?s)rank 0 ended with 1.*no_such_module"):
        run_ranks(hosts, 1, "no_such_module", [], timeout_s=60)


def test_namespaces_are_gone_afterwards(hosts: tuple[Host, Host], monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 0)
    with pytest.raises(KeyError), two_hosts("1gbit") as inner:
        raise KeyError(inner)
    left = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
    assert "hybridflow-0-" not in left and hosts[0].namespace in left


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert wire.main() == 2
    assert "need root" in capsys.readouterr().out


def test_missed_bounds_are_named():
    case = CASES[0]
    assert wire.missed(case, [crossed(), crossed()]) == []
    assert "1.50 of the link" in wire.missed(case, [crossed(seconds=1.5)])[0]
    assert "group (1, 2) spans hosts" in wire.missed(case, [crossed(groups=((0, 3), (1, 2)))])[1]
    assert wire.missed(case, [crossed(), crossed(wrong="w (0, 0)")]) == [f"{case}: rank 1: w (0, 0) is wrong"]


def test_the_assignment_keeps_tensor_groups_in_hosts():
    assert wire._groups(assigned(CASES[0], tp_within_node=True)) == [(0, 1), (2, 3)]


def crossed(seconds: float = 1.2, wrong: str | None = None, groups: tuple = ((0, 1), (2, 3))) -> Crossed:
    clocked = {name: [(wall, wall)] * 3 for name, wall in ((OURS, seconds), (PACKED, seconds), (LINK, 1.0))}
    return Crossed(clocked, 10, 11, wrong, groups)
