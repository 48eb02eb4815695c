"""Recognizes which package (torch.optim, bitsandbytes, torchao, ...) an optimizer's state is from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardopt.checkpoint.peers.base import Dion, Flashoptim, Peer, Torchao
from shardopt.checkpoint.peers.bitsandbytes import Bitsandbytes
from shardopt.checkpoint.wording import few

#: Readers by package. torch.optim's comes last: other packages keep the state of some parameters in its form.
PEERS: tuple[Peer, ...] = (Bitsandbytes(), Torchao(), Flashoptim(), Dion(), Peer())


def package_of(states: Collection[Mapping[str, Any]]) -> Peer:
    """The package that all ``states`` of an optimizer's parameters are from; no state is empty, no entry None.

    Raises:
        ValueError: there is no state, or it is of no known package or of several.
    """
    if not states:
        raise ValueError("got no state at all, expected that of an optimizer which has taken a step")
    for state in states:
        if not any(peer.recognizes(state) for peer in PEERS):
            raise ValueError(
                f"got the state of an unknown optimizer, with {few(state)}, expected a known one: "
                f"{'; '.join(f'{peer.name} has {peer.form}' for peer in PEERS)}. Load shardopt's own with "
                "load_state_dict"
            )
    found = [peer for peer in PEERS[:-1] if any(map(peer.recognizes, states))]
    if len(found) > 1:
        raise ValueError(
            f"got the state of {' and '.join(peer.name for peer in found)}, expected that of one optimizer; save "
            "the state dict again"
        )
    return found[0] if found else PEERS[-1]
