"""Digests of what a run holds, whatever the sharding: equal digests are equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def of_run(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every parameter and every tensor of the optimizer's live state.

    Each tensor is gathered in full, one at a time; all ranks take part and get the same answer.

    Returns:
        ``parameter`` or ``parameter/state entry`` -> hexadecimal digest.
    """
    return {name: _digest(tensor) for name, tensor in _tensors(model, optimizer)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        yield name, parameter
        state = optimizer.state.get(parameter, {})
        for entry in sorted(state):
            if isinstance(state[entry], Tensor):
                yield f"{name}/{entry}", state[entry]


def _digest(tensor: Tensor) -> str:
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.cpu().contiguous()
    digest = hashlib.sha256(f"{full.dtype} {tuple(full.shape)}".encode())
    digest.update(full.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
