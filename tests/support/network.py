"""Two machines on one: namespaces joined by a cable, each with a name and an address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class Node(NamedTuple):
    """One of the two.

    Attributes:
        namespace: that of its network.
        name: its host name, by which the other one finds it.
        address: its IPv4 address.
        interface: its end of the cable.
    """

    namespace: str
    name: str
    address: str
    interface: str

    def start(self, command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        """Starts a process there.

        Args:
            command: the command line.
            **options: of ``subprocess.Popen``.
        """
        named = f'echo {self.name} >/proc/sys/kernel/hostname && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh"]
        return subprocess.Popen([*inside, *(str(part) for part in command)], text=True, **options)

    def pids(self) -> list[int]:
        """All processes there."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def crash(self) -> None:
        """Kills all processes there at once, as the loss of the machine would."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def why_not() -> str | None:
    """Why there can be no such nodes here, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_nodes() as (node, _):
            return None if node.start(["true"]).wait() == 0 else "host names of its own are not allowed"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed: {getattr(error, 'stderr', None) or error}"


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Makes two nodes, and removes them with all their processes, whatever happens."""
    nodes = tuple(Node(f"shardopt-{os.getpid()}-{i}", f"node{i}", f"10.77.0.{i}", f"cable{i}") for i in (1, 2))
    first, second = nodes
    hosts = "".join(f"{node.address} {node.name}\n" for node in nodes)
    try:
        for node in nodes:
            _ip("netns", "add", node.namespace)
            _files(node).mkdir(parents=True)
            (_files(node) / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
            (_files(node) / "resolv.conf").write_text("")  # it would wait for a name server that it cannot reach
        cable = ("link", "add", first.interface, "netns", first.namespace, "type", "veth")
        _ip(*cable, "peer", "name", second.interface, "netns", second.namespace)
        for node in nodes:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.interface)
            for interface in ("lo", node.interface):
                _ip("-n", node.namespace, "link", "set", interface, "up")
        yield first, second
    finally:
        for node in nodes:
            if node.namespace in _ip("netns", "list").split():
                node.crash()
                _ip("netns", "del", node.namespace)
            shutil.rmtree(_files(node), ignore_errors=True)


def _files(node: Node) -> Path:
    """Files that `ip netns exec` puts in the place of those of /etc."""
    return Path("/etc/netns", node.namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
