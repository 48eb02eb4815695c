"""Digests of what a run holds, whatever the sharding: equal digests are equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lm.learner import Learner
from shardopt.checkpoint.chunks import Chunks
from shardopt.checkpoint.contents import Owner, contents_of, model_chunks, optimizer_chunks


def of_run(learner: Learner) -> dict[str, str]:
    """SHA-256 of every parameter and every tensor of the optimizer's live state.

    Each tensor is gathered in full on the host, one at a time; all ranks take part and get the same answer.

    Returns:
        name in a checkpoint -> hexadecimal digest.
    """
    with learner.held() as (model, optimizer):
        contents = contents_of(model, Owner.of(optimizer))
        return _of_tensors({**model_chunks(model, contents), **optimizer_chunks(contents)})


def _of_tensors(held: dict[str, Chunks]) -> dict[str, str]:
    found = {}
    for name, (shape, dtype) in _everywhere({name: (x.shape, x.dtype) for name, x in held.items()}).items():
        whole = torch.zeros(shape, dtype=dtype)
        for corner, part in _written(held[name]) if name in held else ():
            whole[tuple(slice(a, a + n) for a, n in zip(corner, part.shape, strict=True))] = part
        digest = hashlib.sha256(f"{dtype} {tuple(shape)}".encode())
        data = whole.reshape(-1).view(torch.uint8)
        if dist.is_initialized():
            dist.all_reduce(data, dist.ReduceOp.MAX)  # other ranks have zeros there, or the same
        digest.update(data.numpy().data)
        found[name] = digest.hexdigest()
    return found


def _everywhere(here: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The tensors that there are on any rank: one may hold nothing of a parameter's state."""
    ranks = [here]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, here)
    merged = {name: kind for rank in ranks for name, kind in rank.items()}
    return {name: merged[name] for name in sorted(merged)}


def _written(chunks: Chunks) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The rectangles of a tensor that this rank would save: their corners and what is in them."""
    for item in chunks.__create_write_items__("", chunks):
        assert item.index.offset is not None
        yield tuple(item.index.offset), chunks.__get_tensor_shard__(item.index)
