"""Draws front.svg: memory per GPU of a 70B model, and the shardings that one checkpoint loads into.

python docs/figures/make_front.py
"""

from __future__ import annotations

from pathlib import Path

from drawing import BLUE, GREEN, GREY, ORANGE, SMALL, Drawing
from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model

TARGET = Path(__file__).with_name("front.svg")
WIDTH, HEIGHT, LEFT, UNIT = 840, 216, 196, 1.7  # pixels; UNIT is those of 1 GiB
GPUS, CAPACITY = 8, 80
BITS = {"master_weight_bits": 24}
#: Bars: what they are, and how the model is trained.
SETUPS = {
    "AdamW, float32": Setup("adamw", "float32", "fsdp2", GPUS),
    "AdamW8bit, bf16 + 8 bits": Setup("adamw8bit", "bfloat16", "fsdp2", GPUS, options=BITS),
    "... and release_gradients": Setup("adamw8bit", "bfloat16", "fsdp2", GPUS, release_gradients=True, options=BITS),
}
LOADED = ("1 process", "3 ranks, FSDP2", "DeepSpeed ZeRO", "tensor parallel")


def gib(setup: Setup) -> float:
    """GiB on each GPU."""
    use = estimate(Model.of_size("70B"), setup).device
    return (use.parameters + use.gradients + use.state + use.scales + use.master_weights) / 2**30


def figure() -> str:
    """The figure as SVG."""
    drawing = Drawing(WIDTH, "GiB per GPU of a 70B model on 8 GPUs, and a checkpoint that loads under every sharding")
    drawing.text(10, 22, f"70B on {GPUS} x {CAPACITY} GiB, FSDP2: GiB per GPU", bold=True)
    drawing.line([(LEFT + CAPACITY * UNIT, 36), (LEFT + CAPACITY * UNIT, 164)], stroke_dasharray="4 3")
    for row, (name, setup) in enumerate(SETUPS.items()):
        y, size = 44 + 40 * row, gib(setup)
        drawing.text(LEFT - 8, y + 20, name, "end")
        drawing.rect(LEFT, y, size * UNIT, 30, fill=GREEN if size < CAPACITY else ORANGE)
        drawing.text(LEFT + size * UNIT + 6, y + 20, f"{size:.0f}", bold=True)
    drawing.text(LEFT, 182, "weights, gradients and state; activations come on top", font_size=SMALL)
    x = 482
    drawing.text(x, 22, "One checkpoint, any sharding, bitwise equal", bold=True)
    drawing.rect(x, 84, 118, 44, fill="none", stroke=GREY, rx="4")
    drawing.lines(x + 59, 103, ["saved by", "8 ranks, FSDP2"], "middle")
    for row, name in enumerate(LOADED):
        y = 40 + 36 * row
        drawing.arrow((x + 122, 106), (x + 206, y + 14), stroke=BLUE)
        drawing.rect(x + 210, y, 132, 28, fill="none", stroke=BLUE, rx="4")
        drawing.text(x + 276, y + 19, name, "middle")
    return drawing.svg(HEIGHT - 20)


if __name__ == "__main__":
    TARGET.write_text(figure())
