"""Digests of a run's tensors, independent of the sharding: equal digests mean equal bits."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from shardopt.checkpoint.items import Chunks


def of_tensors(held: dict[str, Chunks]) -> dict[str, str]:
    """SHA-256 of tensors of which each rank holds rectangles; see ``shardopt.checkpoint.contents.held_tensors``.

    Gathers each tensor in full on the host, one at a time. All ranks take part and get the same digests.

    Returns:
        name in a checkpoint -> hexadecimal digest.
    """
    here = {name: (chunks.shape, chunks.dtype) for name, chunks in held.items()}
    ranks = [here]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, here)  # a rank may hold no part of a parameter's state
    everywhere = {name: kind for rank in ranks for name, kind in rank.items()}
    digests = {}
    for name, (shape, dtype) in sorted(everywhere.items()):
        whole = torch.zeros(shape, dtype=dtype)
        for offsets, part in held[name].written.items() if name in held else ():
            whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))] = part
        data = whole.reshape(-1).view(torch.uint8)
        if dist.is_initialized():
            dist.all_reduce(data, dist.ReduceOp.MAX)  # other ranks have zeros or the same bytes there
        digest = hashlib.sha256(f"{dtype} {shape}".encode())
        digest.update(data.numpy().data)
        digests[name] = digest.hexdigest()
    return digests
