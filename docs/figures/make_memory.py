"""Draws memory.svg: bytes per parameter of AdamW with torch, bitsandbytes, FlashOptim and shardopt.

    python docs/figures/make_memory.py

Bars of torch and shardopt come from the estimator, for 7B parameters in 4096 x 4096 matrices on one GPU. Bars of other
packages follow from the layouts that they document:

- bitsandbytes 0.50.2, ``AdamW8bit``: one byte per moment and element, and a float32 scale per block of 256.
- FlashOptim 0.1.4 (arXiv 2602.23349), ``FlashAdamW`` with ``master_weight_bits=24``: bfloat16 weights and gradients,
  one byte per moment and element, a float16 scale per group of 32, and one byte that extends the weight.

Text is of a medium grey, so that light and dark pages show the figure equally well.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model

TARGET = Path(__file__).with_name("memory.svg")
KINDS = {"weights": "#3b82d6", "gradients": "#e0822a", "optimizer state": "#2fa05a", "master bits": "#8f6ad0"}
GREY = "#78828e"
WIDTH, LEFT, TOP, ROW, UNIT = 840, 300, 40, 26, 29  # pixels; UNIT is those of one byte


class Bar(NamedTuple):
    """Bytes per parameter, by kind in the order of ``KINDS``."""

    name: str
    parts: tuple[float, float, float, float]


def estimated(
    name: str, optimizer: str = "adamw", dtype: str = "bfloat16", release: bool = False, **options: object
) -> Bar:
    """A bar of what :func:`shardopt.memory_report` would find on the GPU."""
    model = Model.of_size("7B")
    setup = Setup(optimizer=optimizer, dtype=dtype, release_gradients=release, options=options)
    use = estimate(model, setup).device
    state = use.state + use.scales + use.offload_buffers
    return Bar(name, tuple(n / model.numel for n in (use.parameters, use.gradients, state, use.master_weights)))


def bars() -> list[list[Bar]]:
    """Bars in groups: torch, the other packages, shardopt."""
    bits = {"master_weight_bits": 24}
    return [
        [estimated("torch AdamW, float32", dtype="float32", codec="fp32")],
        [
            Bar("bitsandbytes AdamW8bit, float32 weights", (4, 4, 2 * (1 + 4 / 256), 0)),
            Bar("FlashOptim AdamW, bf16 + 8 bits", (2, 2, 2 * (1 + 2 / 32), 1)),
            Bar("FlashOptim, released gradients", (2, 0, 2 * (1 + 2 / 32), 1)),
        ],
        [
            estimated("shardopt AdamW8bit, float32 weights", dtype="float32"),
            estimated("bf16 + 8 bits", **bits),
            estimated("... and release_gradients", release=True, **bits),
            estimated("... and AdamW4bit (experimental)", release=True, codec="log4", **bits),
            estimated('AdamW8bit, ... and offload="state"', release=True, offload="state", **bits),
        ],
    ]


def draw(groups: list[list[Bar]]) -> str:
    """The figure as SVG."""
    lines, y = [], TOP
    for group in groups:
        for bar in group:
            name = bar.name.replace("&", "&amp;").replace('"', "&quot;")
            lines.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
            x = float(LEFT)
            for size, colour in zip(bar.parts, KINDS.values(), strict=True):
                if size * UNIT >= 0.5:
                    lines.append(
                        f'<rect x="{x:.1f}" y="{y}" width="{size * UNIT:.1f}" height="{ROW - 6}" fill="{colour}"/>'
                    )
                x += size * UNIT
            lines.append(f'<text x="{x + 7:.1f}" y="{y + 14}" font-weight="bold">{sum(bar.parts):.2f}</text>')
            y += ROW
        y += 12
    legend = float(LEFT)
    for kind, colour in KINDS.items():
        lines.append(f'<rect x="{legend:.0f}" y="10" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{legend + 18:.0f}" y="21">{kind}</text>')
        legend += 40 + 7.2 * len(kind)
    lines.append(f'<text x="{LEFT}" y="{y + 6}">bytes per parameter on the GPU, activations not counted</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" width="{WIDTH}" height="{y + 16}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{GREY}" role="img">'
    )
    title = "<title>Memory per parameter of AdamW: torch, bitsandbytes, FlashOptim, shardopt</title>"
    return "\n".join([head, title, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(bars()))
