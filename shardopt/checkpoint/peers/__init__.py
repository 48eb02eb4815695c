"""The packages whose optimizer state shardopt reads, one small file for each."""

from __future__ import annotations

from shardopt.checkpoint.peers.base import Peer
from shardopt.checkpoint.peers.bitsandbytes import Bitsandbytes
from shardopt.checkpoint.peers.dion import Dion
from shardopt.checkpoint.peers.flashoptim import Flashoptim
from shardopt.checkpoint.peers.torchao import Torchao

#: torch.optim, whose names other packages use, too.
TORCH = Peer()

#: The other packages. Each keeps the state of some parameters as torch.optim does.
OTHERS: tuple[Peer, ...] = (Bitsandbytes(), Torchao(), Flashoptim(), Dion())
