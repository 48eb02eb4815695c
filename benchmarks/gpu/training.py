"""A small language model with five optimizers, offloaded and released steps, FSDP2 on one rank."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import shardopt
import shardopt.checkpoint
from gpu.common import DEVICE, FAKE, ROOT, Left, Report
from lm.model import ModelConfig, Transformer


def model_of(width: int, layers: int, dtype: torch.dtype | None = None) -> Transformer:
    """A decoder of bytes with the same weights each time."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width, layers, 4 if FAKE else 8), 256).to(DEVICE)
    return model if dtype is None else model.to(dtype)


def corpus() -> Any:
    """Bytes of the checkout's own text."""
    files = sorted(
        p for kind in ("*.py", "*.md", "*.h", "*.cu", "*.cpp") for p in ROOT.rglob(kind) if ".venv" not in str(p)
    )
    data = b"".join(p.read_bytes() for p in files)[:8_000_000]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


def loss_on(model: Any, data: Any, generator: Any, batch: int, length: int) -> Any:
    at = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    x = torch.stack([data[i : i + length + 1] for i in at.tolist()]).long()
    logits = model(x[:, :-1])
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())


def training(report: Report, left: Left, part: int, parts: int) -> None:
    """A small language model, some hundred steps with each optimizer, from the same weights on the same data."""
    data = corpus()
    held = data[-len(data) // 10 :]
    steps, batch, length = (3, 2, 32) if FAKE else (300, 64, 256)
    runs: dict[str, tuple[Any, Callable[[list[Any]], Any]]] = {
        "torch fused, fp32 weights": (None, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        "log8, fp32 weights": (None, lambda p: shardopt.AdamW8bit(p, lr=1e-3)),
        "log8, bf16 weights + 8 bits": (
            torch.bfloat16, lambda p: shardopt.AdamW8bit(p, lr=1e-3, master_weight_bits=24)
        ),
        "companded8, bf16 weights + 8 bits": (
            torch.bfloat16, lambda p: shardopt.AdamW8bit(p, lr=1e-3, master_weight_bits=24, codec="companded8")
        ),
        "torch fused, bf16 weights": (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
    }  # fmt: skip
    for name, (dtype, make) in runs.items():
        if left() < 6:
            report.put(name, "left out: no time left")
            continue
        model = model_of(64 if FAKE else 512, 2 if FAKE else 6, dtype)
        optimizer = make(list(model.parameters()))
        generator = torch.Generator().manual_seed(1)
        losses, began = [], time.perf_counter()
        for step in range(steps):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is None and not FAKE):
                loss = loss_on(model, data[: len(data) * 9 // 10], generator, batch, length)
            loss.backward()
            shardopt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 25 == 0:
                losses.append(round(loss.item(), 4))
        seconds = time.perf_counter() - began
        with torch.no_grad():
            final = statistics.mean(
                loss_on(model, held, torch.Generator().manual_seed(9 + i), batch, length).item() for i in range(4)
            )
        report.put(
            name, {"held out": round(final, 4), "every 25": losses, "ms per step": round(1e3 * seconds / steps, 2)}
        )
        del model, optimizer


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for backend in (
        "flash",
        "mem_efficient",
        "cudnn",
    ):  # with warn_only, attention's backward pass is not deterministic
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)


def same(report: Report, left: Left, part: int, parts: int) -> None:
    """Variants of a short run that must end with the bits of the plain one."""
    data = corpus()
    be_deterministic()
    variants: dict[str, tuple[dict[str, Any], bool, bool]] = {
        "plain": ({}, False, False),
        "released": ({}, True, False),
        'offload="state"': ({"offload": "state"}, False, False),
        'offload="step"': ({"offload": "step"}, False, False),
        'offload="step", released, overlapped': ({"offload": "step"}, True, True),
    }
    if FAKE:
        variants = {name: ({}, release, False) for name, (_, release, overlap) in variants.items() if not overlap}
    wanted: list[Any] = []
    for name, (options, release, overlap) in variants.items():
        if left() < 3:
            break
        model = model_of(64 if FAKE else 256, 2, torch.bfloat16)
        optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-3, master_weight_bits=24, **options)
        if release:
            shardopt.release_gradients(model, optimizer, overlap_forward=overlap)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            loss_on(model, data, generator, 8, 64).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        got = [p.detach().cpu() for p in model.parameters()]
        wanted = wanted or got
        wrong = sum(not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, wanted, strict=True))
        report.put(name, "same bits" if wrong == 0 else f"{wrong} of {len(got)} parameters differ")


def fsdp(report: Report, left: Left, part: int, parts: int) -> None:
    """FSDP2 on one rank of NCCL: the bits of the plain model; a checkpoint; CPUOffloadPolicy; ordered gradients."""
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo" if FAKE else "cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    if not FAKE:
        torch.cuda.set_device(0)
    data = corpus()
    be_deterministic()

    def trained(wrap: Callable[[Any], None], after: Callable[[Any, Any], None] = lambda m, o: None) -> list[Any]:
        model = model_of(64 if FAKE else 256, 2, torch.bfloat16)
        wrap(model)
        optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-3, master_weight_bits=24)
        after(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            loss_on(model, data, generator, 8, 64).backward()
            shardopt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        folder = tempfile.mkdtemp()
        shardopt.checkpoint.save(folder, model, optimizer)
        shardopt.checkpoint.load(folder, model, optimizer)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().cpu() for p in whole]

    def sharded(model: Any, **options: Any) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, **options)

    wanted = trained(lambda model: None)
    for name, wrap in {
        "FSDP2": sharded,
        "FSDP2, CPUOffloadPolicy": lambda model: sharded(model, offload_policy=CPUOffloadPolicy()),
    }.items():
        if left() < 4 or (FAKE and "Offload" in name):  # the policy needs a GPU
            break
        got = trained(wrap)
        wrong = sum(not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, wanted, strict=True))
        report.put(name, "same bits" if wrong == 0 else f"{wrong} of {len(got)} parameters differ")
    dist.destroy_process_group()
