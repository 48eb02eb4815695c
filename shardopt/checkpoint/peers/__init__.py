"""The packages whose optimizer state shardopt reads, one small file for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardopt.checkpoint.peers.base import Peer
from shardopt.checkpoint.peers.bitsandbytes import Bitsandbytes
from shardopt.checkpoint.peers.dion import Dion
from shardopt.checkpoint.peers.flashoptim import Flashoptim
from shardopt.checkpoint.peers.torchao import Torchao

#: torch.optim, whose names other packages use, too.
TORCH = Peer()

#: The other packages. Each keeps the state of some parameters as torch.optim does.
OTHERS: tuple[Peer, ...] = (Bitsandbytes(), Torchao(), Flashoptim(), Dion())


def package_of(states: Collection[Mapping[str, Any]]) -> Peer:
    """The package that wrote the states of an optimizer's parameters: torch.optim if no other's form is among them.

    Raises:
        ValueError: there are forms of several packages.
    """
    packages = [peer for peer in OTHERS if any(map(peer.recognizes, states))]
    if len(packages) > 1:
        raise ValueError(
            f"got the state of {' and '.join(peer.name for peer in packages)}, expected that of one optimizer; save "
            "the state dict again"
        )
    return packages[0] if packages else TORCH
