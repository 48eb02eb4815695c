"""A small model, its estimate, and a report of a real step to compare with."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from shardopt.estimate import Model
from shardopt.report import MemoryReport, MemoryUse

KINDS = [field.name for field in fields(MemoryUse)]


class Layers(nn.Module):
    """1.2 million parameters: rows that end within blocks, biases and norms; dimensions that no 3 ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1001, 160)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(160), nn.Linear(160, 872), nn.ReLU(), nn.Linear(872, 160)) for _ in range(3)
        )
        self.head = nn.Linear(160, 1001, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).float().square().mean()


TOKENS = torch.arange(8).view(2, 4)


def estimated_model() -> Model:
    """The model's shapes, from the meta device."""
    with torch.device("meta"):
        return Model.of("layers", Layers())


def both(report: MemoryReport) -> dict[str, int]:
    """Bytes on device and host together: in these tests a run has only the CPU."""
    return {kind: getattr(report.device, kind) + getattr(report.host, kind) for kind in KINDS}


def assert_near(actual: dict[str, int], expected: dict[str, int]) -> None:
    """Demands each kind of memory within 1% of the total."""
    total = sum(actual.values())
    assert actual.keys() == expected.keys()
    assert total or not sum(expected.values())
    for kind, nbytes in actual.items():
        off = expected[kind] - nbytes
        assert abs(off) <= 0.01 * total, f"{kind}: got {off:,} bytes more than expected, of {total:,}"
