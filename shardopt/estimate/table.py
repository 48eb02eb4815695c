"""The estimate as rows: a table, or values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shardopt.estimate.backends import BACKENDS
from shardopt.estimate.hiding import Hiding, Machine, hiding, text_of
from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model
from shardopt.optim import OPTIMIZERS, Muon
from shardopt.report import MemoryReport, MemoryUse

#: The kinds of memory, as columns: fields of :class:`MemoryUse` and headings.
COLUMNS = {
    "parameters": "weights",
    "gradients": "gradients",
    "gradient_sums": "gradient sums",
    "state": "state",
    "scales": "scales",
    "master_weights": "master weights",
    "offload_buffers": "offload buffers",
}

_GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One way to train a model, and what it takes.

    Attributes:
        name: how the table calls it.
        model: the parameters.
        setup: how they are trained.
        machine: on what.
    """

    name: str
    model: Model
    setup: Setup
    machine: Machine = field(default_factory=Machine)

    @cached_property
    def report(self) -> MemoryReport:
        """The most that any rank has."""
        return estimate(self.model, self.setup)

    def per_parameter(self, use: MemoryUse) -> dict[str, float]:
        """Bytes by kind over the parameters of the whole model."""
        return {kind: getattr(use, kind) / self.model.numel for kind in COLUMNS}

    @property
    def gib_per_gpu(self) -> float:
        return self.report.device.total / _GIB

    @property
    def gib_per_host(self) -> float:
        """Of all ranks on a host, where each has the most."""
        ranks = min(self.setup.gpus_per_node, self.setup.world_size)
        return ranks * self.report.host.total / _GIB

    @property
    def hiding(self) -> Hiding | None:
        """Hidden share of the CPU's step; None if the CPU takes none."""
        if not self.setup.steps_on_host or not self.report.host.state:
            return None
        return hiding(self.model.numel, self.report, self.setup, self.machine)

    def values(self) -> dict[str, Any]:
        """For JSON."""
        report, hides = self.report, self.hiding
        offload_step = (
            None
            if hides is None
            else {
                "machine": asdict(hides.machine),
                "seconds": {window.name: window._asdict() for window in hides.windows},
                "bound_by": hides.bound_by,
                "hidden": hides.hidden,
                "hides_from_tokens": hides.tokens,
                "host_ns_per_parameter": hides.ns_per_parameter,
            }
        )
        return {
            "name": self.name,
            "setup": {**asdict(self.setup), "options": dict(self.setup.options)},
            "gpu_bytes": asdict(report.device),
            "host_bytes_per_gpu": asdict(report.host),
            "gpu_bytes_per_parameter": {
                **self.per_parameter(report.device),
                "total": report.device.total / self.model.numel,
            },
            "gib_per_gpu": self.gib_per_gpu,
            "gib_per_host": self.gib_per_host,
            "offload_step": offload_step,
        }


def ladder(model: Model) -> list[Row]:
    """AdamW on one GPU, from float32 throughout to all that shardopt has."""
    masters = {"master_weight_bits": 24}
    return [
        Row("fp32 throughout", model, Setup("adamw", "float32")),
        Row("8-bit state, fp32 weights", model, Setup(dtype="float32")),
        Row("bf16 weights, 24-bit masters", model, Setup(options=masters)),
        Row("  + release_gradients", model, Setup(release_gradients=True, options=masters)),
        Row("  + offload='state'", model, Setup(release_gradients=True, options={**masters, "offload": "state"})),
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes below the table: meaning and limits of its figures."""
    lines = [
        "Bytes per parameter of the whole model, on the GPU that holds most; what is offloaded is in GiB per host.",
        "Not counted: activations, the framework's other buffers, the allocator's slack.",
        rows[0].model.note,
    ]
    setups = [row.setup for row in rows]
    released = [setup for setup in setups if setup.release_gradients]
    if any(setup.backend == "single" for setup in released):
        lines.append("Released gradients: the largest single parameter's is counted.")
    if any(setup.backend == "fsdp2" for setup in released):
        lines.append("Released gradients with fsdp2: those of the largest unit are counted.")
    if any(issubclass(OPTIMIZERS[setup.optimizer], Muon) for setup in setups):
        lines.append("Muon: a step takes 512 MiB on top, or what the largest matrices need.")
    if _are_ordered(rows):
        lines.append(
            "Ordered gradients: the most float32 sums that wait between backward passes are counted; in the last pass "
            "they become the gradients."
        )
    waiting = max((setup.gradients_at_once or 1 for setup in released), default=1)
    if waiting > 1:
        lines.append(f"Released gradients with offload='step': up to {waiting} successive parameters' are counted.")
    used = {setup.backend for setup in setups}
    if "ddp" in used or "zero_redundancy" in used:
        lines.append(
            "DDP: gradients are taken as views of its buckets (gradient_as_bucket_view=True), without which they take "
            "twice as much; releasing them then saves nothing."
        )
    if "fsdp1" in used or "fsdp2" in used:
        lines.append(
            "FSDP: layers are units, and so is the rest together (fsdp1: use_orig_params=True). The unsharded weights "
            "and gradients of the units at work come on top."
        )
    if any(BACKENDS[name].zero_stage for name in used):
        lines.append(
            "DeepSpeed: while the optimizer steps, with one param group and no accumulation of gradients. Masters are "
            "float32, or with master_weight_bits in the state (bf16_master_weights_and_grads). Its buckets "
            "(reduce_bucket_size: 1 GB by default in bf16), gathered weights and, with zero_offload, two copies of the "
            "largest gradient come on top."
        )
    return [note for note in lines if note]


def _are_ordered(rows: Sequence[Row]) -> bool:
    return any(row.setup.orders for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    model = rows[0].model
    columns = {kind: name for kind, name in COLUMNS.items() if kind != "gradient_sums" or _are_ordered(rows)}
    head = ["", *columns.values(), "total", "GiB per GPU", "GiB per host"]
    cells = [head]
    for row in rows:
        total = row.report.device.total / model.numel
        digits = 2 if total >= 1 else 4
        per_parameter = row.per_parameter(row.report.device)
        kinds = [*(per_parameter[kind] for kind in columns), total]
        gib = [f"{row.gib_per_gpu:.2f}", f"{row.gib_per_host:.2f}"]
        cells.append([row.name, *(f"{value:.{digits}f}" for value in kinds), *gib])
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [f"{model.name}: {model.numel:,} parameters, the largest of {model.largest:,}"]
    for line in cells:
        first, *rest = zip(line, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip())
    for row in rows:
        if row.hiding is not None:
            lines += ["", *text_of(row.hiding)]
    return "\n".join([*lines, "", *notes(rows)])
