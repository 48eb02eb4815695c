"""A small language model with five optimizers; FSDP2 on one rank."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import shardopt
import shardopt.checkpoint
from gpu.common import DEVICE, FAKE, ROOT, Left, Report, synchronize
from gpu.facts import compared
from lm.model import ModelConfig, Transformer


def model_of(width: int, layers: int, dtype: torch.dtype | None = None) -> Transformer:
    """A decoder of bytes with the same weights each time."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width, layers, 4 if FAKE else 8), 256).to(DEVICE)
    return model if dtype is None else model.to(dtype)


def corpus() -> Any:
    """Bytes of the checkout's own text."""
    folders = ("shardopt", "csrc", "docs", "tests", "benchmarks", "launch")
    files = sorted(
        p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".h", ".cpp")
    )
    data = b"".join(p.read_bytes() for p in files)[:8_000_000]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


def loss_on(model: Any, data: Any, generator: Any, batch: int, length: int) -> Any:
    at = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    x = torch.stack([data[i : i + length + 1] for i in at.tolist()]).long()
    logits = model(x[:, :-1])
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())


def train(model: Any, optimizer: Any, data: Any, steps: int, batch: int, length: int) -> list[Any]:
    """Clipped steps on the same data each time; their losses. Weights in float32 are computed with in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    mixed = next(model.parameters()).dtype == torch.float32 and not FAKE
    for _ in range(steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
            loss = loss_on(model, data, generator, batch, length)
        loss.backward()
        shardopt.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    return losses


def fused(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def ours(params: Any, **options: Any) -> Any:
    return shardopt.AdamW8bit(params, lr=1e-3, **options)


#: The weights' dtype, None for float32, and the optimizer.
RUNS: dict[str, tuple[torch.dtype | None, Callable[[Any], Any]]] = {
    "torch fused, fp32 weights": (None, fused),
    "log8, fp32 weights": (None, ours),
    "log8, bf16 weights + 8 bits": (torch.bfloat16, partial(ours, master_weight_bits=24)),
    "companded8, bf16 weights + 8 bits": (torch.bfloat16, partial(ours, master_weight_bits=24, codec="companded8")),
    "torch fused, bf16 weights": (torch.bfloat16, fused),
}


def training(report: Report, left: Left, part: int, parts: int) -> None:
    """A small language model, some hundred steps with each optimizer, from the same weights on the same data."""
    data = corpus()
    split = len(data) * 9 // 10
    steps, batch, length = (3, 2, 32) if FAKE else (300, 64, 256)

    def run(name: str) -> None:
        dtype, make = RUNS[name]
        model = model_of(64 if FAKE else 512, 2 if FAKE else 6, dtype)
        optimizer = make(list(model.parameters()))
        began = time.perf_counter()
        losses = train(model, optimizer, data[:split], steps, batch, length)
        ms = 1e3 * (time.perf_counter() - began) / steps
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            held = statistics.mean(loss_on(model, data[split:], generator, batch, length).item() for _ in range(4))
        every = [round(loss.item(), 4) for loss in losses[::25]]
        report.put(name, {"held out": round(held, 4), "every 25": every, "ms per step": round(ms, 2)})

    for name in RUNS:
        report.attempt(name, left, 6, partial(run, name))


def fsdp(report: Report, left: Left, part: int, parts: int) -> None:
    """FSDP2 on one rank of NCCL, clipped, offloaded, and back from a checkpoint: the bits of the plain model."""
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo" if FAKE else "cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    if not FAKE:
        torch.cuda.set_device(0)
    data = corpus()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for backend in ("flash", "mem_efficient", "cudnn"):  # with warn_only, their backward pass is not deterministic
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)

    def trained(**options: Any) -> list[Any]:
        model = model_of(64 if FAKE else 256, 2, torch.bfloat16)
        for module in (*model.blocks, model) if options else ():
            fully_shard(module, **options)
        optimizer = ours(model.parameters(), master_weight_bits=24)
        train(model, optimizer, data, 2, 8, 64)
        if options:
            folder = tempfile.mkdtemp()
            shardopt.checkpoint.save(folder, model, optimizer)
            train(model, optimizer, data, 1, 8, 64)
            shardopt.checkpoint.load(folder, model, optimizer)
        train(model, optimizer, data, 2, 8, 64)
        return [p.full_tensor() if options else p for p in model.parameters()]

    wanted = trained()
    kinds = {"FSDP2": {"reshard_after_forward": True}}
    kinds["FSDP2, CPUOffloadPolicy"] = {"offload_policy": CPUOffloadPolicy(pin_memory=not FAKE)}
    for name, options in kinds.items():
        report.attempt(name, left, 4, lambda n=name, o=options: report.put(n, compared(wanted, trained(**o))))
    dist.destroy_process_group()
