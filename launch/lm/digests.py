"""Digests of a run's tensors, independent of the sharding: equal digests mean equal bits."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from lm.learner import Learner
from shardopt.checkpoint.contents import held_tensors
from shardopt.checkpoint.items import Chunks


def of_run(learner: Learner) -> dict[str, str]:
    """SHA-256 of every parameter, buffer and tensor of the optimizer's live state.

    Gathers each tensor in full on the host, one at a time. All ranks take part and get the same digests.

    Returns:
        name in a checkpoint -> hexadecimal digest.
    """
    with learner.held() as (model, optimizer):
        return of_tensors(held_tensors(model, optimizer))


def of_tensors(held: dict[str, Chunks]) -> dict[str, str]:
    found = {}
    for name, (shape, dtype) in _everywhere({name: (x.shape, x.dtype) for name, x in held.items()}).items():
        whole = torch.zeros(shape, dtype=dtype)
        for offsets, part in held[name].written.items() if name in held else ():
            whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))] = part
        digest = hashlib.sha256(f"{dtype} {tuple(shape)}".encode())
        data = whole.reshape(-1).view(torch.uint8)
        if dist.is_initialized():
            dist.all_reduce(data, dist.ReduceOp.MAX)  # other ranks have zeros or the same bytes there
        digest.update(data.numpy().data)
        found[name] = digest.hexdigest()
    return found


def _everywhere(here: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors of all ranks: a rank may hold no part of a parameter's state."""
    ranks = [here]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, here)
    merged = {name: kind for rank in ranks for name, kind in rank.items()}
    return {name: merged[name] for name in sorted(merged)}
