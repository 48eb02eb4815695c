"""Training of the task `bytes` over 5,000 steps, as real runs are: with micro-batches and clipping.

Held-out losses and moments are looked at on the way.
"""

from __future__ import annotations

from quality.task import Task
from quality.tasks import bytes as short

SMALL = {**short.SMALL, "heldout_windows": 1024}
#: 1.01 billion parameters.
LARGE = {"dim": 2048, "layers": 20, "heads": 16, "context": 1024, "batch": 8, "heldout_windows": 512}


def task(size: str) -> Task:
    settings, lr, seeds, micro_batches = (LARGE, 3e-4, 3, 4) if size == "large" else (SMALL, 2e-3, 10, 2)
    return Task(
        "long",
        settings,
        steps=5000,
        lr=lr,
        load=short.load,
        seeds=seeds,
        micro_batches=micro_batches,
        clip=1.0,
        marks=(0.05, 0.1, 0.2, 0.4, 1.0),
    )
