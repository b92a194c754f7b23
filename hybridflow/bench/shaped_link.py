"""Two hosts in one: network namespaces with one link between them, whose bandwidth is limited both ways.

Owns the namespaces, and the processes of a job on them. Needs root and iproute2; what it makes is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"  # of either host, in its own namespace
PORT = 29500  # nobody else is in these namespaces
BURST, LATENCY = "256kb", "50ms"  # a smaller burst does not reach the rate


class NoLink(RuntimeError):
    """This process cannot make network namespaces; the message says what is missing."""


class RankFailed(RuntimeError):
    """A rank ended with an error, or not in time."""


@dataclass(frozen=True)
class Host:
    """A network namespace. Example: Host("hybridflow-17-0", "10.77.0.1")."""

    namespace: str
    address: str


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts whose link carries `rate` in each direction (as tc writes it: "1gbit").

    Raises:
        NoLink: not root, or no `ip` and `tc`, or the kernel refuses.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        raise NoLink("two hosts on a shaped link need root" + "".join(f" and `{tool}`" for tool in missing))
    one, other = hosts = tuple(Host(f"hybridflow-{os.getpid()}-{n}", f"10.77.0.{n + 1}") for n in range(2))
    try:
        for host in hosts:
            _call("ip", "netns", "add", host.namespace)
        _call("ip", "-n", one.namespace, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns",
              other.namespace)
        for host in hosts:
            _call("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _call("ip", "-n", host.namespace, "link", "set", interface, "up")
            _call("tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst",
                  BURST, "latency", LATENCY)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(("ip", "netns", "del", host.namespace), capture_output=True, check=False)


def run_ranks(hosts: Sequence[Host], ranks_per_host: int, module: str, arguments: Sequence[str], timeout_s: float,
              ) -> None:
    """Run `python -m module` once for each rank, as a launcher would, and wait.

    Raises:
        RankFailed: with what the rank has written; all others are ended.
    """
    size = len(hosts) * ranks_per_host
    processes = [_start(hosts[rank // ranks_per_host], hosts[0], rank, size, ranks_per_host, [module, *arguments])
                 for rank in range(size)]
    deadline = time.monotonic() + timeout_s
    try:
        for rank, process in enumerate(processes):
            try:
                written, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankFailed(f"rank {rank} was not done after {timeout_s:.0f} s") from None
            if process.returncode:
                raise RankFailed(f"rank {rank} ended with {process.returncode}:\n{written}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def bytes_sent() -> int:
    """By this host over its link since it was made, headers included: the kernel's count."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _start(host: Host, first: Host, rank: int, size: int, ranks_per_host: int, command: Sequence[str],
           ) -> subprocess.Popen:
    launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % ranks_per_host,
                "LOCAL_WORLD_SIZE": ranks_per_host, "MASTER_ADDR": first.address, "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1}
    return subprocess.Popen(("ip", "netns", "exec", host.namespace, sys.executable, "-m", *command), text=True,
                            env=os.environ | {name: str(value) for name, value in launched.items()},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"`{' '.join(command)}`: {done.stderr.strip()}")
