"""Whether the CPU's step with ``offload="step"`` hides beside the GPU's work: times of GPU, link and host.

GPU: a forward pass takes 2 FLOP per parameter and token, a backward pass 4 (Kaplan et al. 2020, arXiv:2001.08361,
section 2.1). Link: copies in both directions run at the same time. Host: the kernels' arithmetic, divided among the
cores, and the bytes that they read and write, at the memory's rate. Neither hides the other here: this sum is 1.3 times
the step that benchmarks/results/step_cpu_bfloat16 has for two cores of a Sapphire Rapids (0.76 ns per parameter, of
which arithmetic alone takes 0.68 and memory alone 0.31).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from shardopt.estimate.ledger import DTYPES, Setup
from shardopt.report import MemoryReport

FORWARD_FLOP, BACKWARD_FLOP = 2, 4  # per parameter and token

#: Nanoseconds in which a core takes an element's share of the exact norm (notes of benchmarks/results/clip, Zen 4).
NORM_NS = 0.19

_GIGA, _TERA, _NANO = 1e9, 1e12, 1e-9


@dataclass(frozen=True)
class Machine:
    """A host and its GPUs, by what training reaches on them. Defaults are a server with H100 GPUs.

    Attributes:
        gpu_tflops: of each GPU, in 10^12 FLOP per second. Default: 40% of the 989 of an H100's data sheet.
        link_gbps: of each GPU, to the host and back at the same time, in 10^9 bytes per second each. Default: of the 63
            of PCIe 5 with 16 lanes.
        host_gbps: reads and writes of the host's memory together, in 10^9 bytes per second. Default: 75% of the 307 of
            eight channels of DDR5-4800, one socket.
        host_cores: that step.
        core_ns: nanoseconds per parameter in which a core steps what is in its cache. Default: AdamW with log8 state
            and 24-bit masters on a Sapphire Rapids (benchmarks/results/step_cpu_in_cache); measure another one with
            benchmarks/step_cpu.py --in-cache --dtype bfloat16.
        tokens: of a micro-batch, on each GPU.

    Raises:
        ValueError: one of them is not above 0.
    """

    gpu_tflops: float = 400.0
    link_gbps: float = 50.0
    host_gbps: float = 230.0
    host_cores: int = 48
    core_ns: float = 1.35
    tokens: int = 8192

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}: got {value}, expected a number above 0")

    def gpu_seconds(self, numel: float, flop: int) -> float:
        """Seconds of a pass.

        Args:
            numel: the model's parameters.
            flop: per parameter and token.
        """
        return numel * flop * self.tokens / (self.gpu_tflops * _TERA)

    def link_seconds(self, nbytes: float) -> float:
        """Seconds of copying so many bytes in one direction."""
        return nbytes / (self.link_gbps * _GIGA)

    def step_seconds(self, numel: float, nbytes: float) -> float:
        """Seconds of the host's step.

        Args:
            numel: parameters that the host steps.
            nbytes: read and written together.
        """
        return numel * self.core_ns * _NANO / self.host_cores + self.memory_seconds(nbytes)

    def norm_seconds(self, numel: float, nbytes: float) -> float:
        """Seconds in which the host takes the share of the norm of so many elements, in so many bytes."""
        return numel * NORM_NS * _NANO / self.host_cores + self.memory_seconds(nbytes)

    def memory_seconds(self, nbytes: float) -> float:
        """Seconds in which the host reads or writes so many bytes."""
        return nbytes / (self.host_gbps * _GIGA)


class Window(NamedTuple):
    """A pass of the GPU, and what goes on beside it.

    Attributes:
        name: of the pass; "nothing" if there is none.
        gpu: seconds of the pass.
        link: seconds of copies, in the direction that takes longer.
        host: seconds of the host's work.
    """

    name: str
    gpu: float
    link: float
    host: float

    @property
    def hidden(self) -> float:
        """The share of the longer one of copies and the host's work that the pass hides."""
        return min(self.gpu / max(self.link, self.host), 1.0)

    @property
    def bound_by(self) -> str:
        """The longest of the three: "GPU", "link" or "host"."""
        times = {"GPU": self.gpu, "link": self.link, "host": self.host}
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Hiding:
    """The hidden share of the host's work on a machine.

    Attributes:
        machine: the machine.
        windows: the pass beside which the host steps, and before it that in which gradients come, if they come earlier.
        ns_per_parameter: of the host's step, as each rank sees it.
    """

    machine: Machine
    windows: tuple[Window, ...]
    ns_per_parameter: float

    @property
    def bound_by(self) -> str:
        """The bound of the window that hides least."""
        return min(self.windows, key=lambda window: window.hidden).bound_by

    @property
    def hidden(self) -> float:
        """The share of the host's step that hides."""
        return self.windows[-1].hidden

    @property
    def tokens(self) -> int | None:
        """Tokens of a micro-batch per GPU, from which on everything hides; None if nothing goes on beside the step."""
        if not all(window.gpu for window in self.windows):
            return None
        return math.ceil(max(self.machine.tokens * max(w.link, w.host) / w.gpu for w in self.windows))


def hiding(numel: int, report: MemoryReport, setup: Setup, machine: Machine) -> Hiding:
    """Computes the hidden share of the CPU's step.

    Args:
        numel: parameters of the whole model.
        report: what a rank has.
        setup: training, with ``offload="step"``.
        machine: on what.
    """
    ranks = min(setup.gpus_per_node, setup.world_size)
    on_host, on_device = (use.state + use.scales + use.master_weights for use in (report.host, report.device))
    stepped = report.numel * on_host / (on_host + on_device)  # the rest stays by device_state_budget
    weight = DTYPES[setup.dtype].itemsize
    several = setup.gathers_on_host and setup.micro_batches not in (None, 1)
    gradient = 4 if several else weight
    step = machine.step_seconds(ranks * stepped, ranks * ((gradient + 2 * weight) * stepped + 2 * on_host))
    weights = machine.link_seconds(weight * stepped)
    both = machine.link_seconds(2 * weight * stepped)
    backward = machine.gpu_seconds(numel, BACKWARD_FLOP)
    if setup.gathers_on_host:
        # Gradients are written by the link, and read for the norm; several are added to sums.
        moved = ranks * stepped * (2 * weight + (8 if several else 0))
        arrival = machine.norm_seconds(ranks * stepped, moved)
        windows: tuple[Window, ...] = (
            Window("backward pass", backward, weights, arrival),
            Window("next forward pass", machine.gpu_seconds(numel, FORWARD_FLOP), weights, step),
        )
    elif setup.release_gradients:
        windows = (Window("backward pass", backward, both, step),)
    else:
        windows = (Window("nothing", 0.0, both, step),)
    return Hiding(machine, windows, step / max(stepped, 1) / _NANO)


def text_of(found: Hiding) -> list[str]:
    """The findings in lines."""
    machine = found.machine
    lines = [
        f"offload='step' with {machine.gpu_tflops:g} TFLOP/s and {machine.link_gbps:g} GB/s each way per GPU, "
        f"{machine.host_gbps:g} GB/s and {machine.host_cores} cores per host, micro-batches of {machine.tokens} tokens "
        "per GPU:"
    ]
    for window in found.windows:
        lines.append(
            f"  beside {window.name if window.gpu else 'no pass'}: GPU {window.gpu:.3g} s, link {window.link:.3g} s, "
            f"host {window.host:.3g} s"
        )
    from_tokens = "needs release_gradients" if found.tokens is None else f"all from {found.tokens} tokens on"
    lines.append(
        f"  bound by: {found.bound_by}; hidden: {found.hidden:.0%} of the host's step "
        f"({found.ns_per_parameter:.3g} ns per parameter), {from_tokens}"
    )
    return lines
