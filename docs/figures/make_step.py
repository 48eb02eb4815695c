"""Draws step.svg: the way of a gradient through one step, and the memory that the step reads and writes.

    python docs/figures/make_step.py

Bytes per parameter are the estimator's, for 7B parameters in 4096 x 4096 matrices on one GPU. A step reads all of them
once, and writes all but the gradients once.
"""

from __future__ import annotations

from pathlib import Path

from drawing import GREY, KINDS, PINK, SMALL, Drawing
from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model

TARGET = Path(__file__).with_name("step.svg")
WIDTH, UNIT = 840, 29  # pixels: of the figure, of a byte per parameter
STATE = KINDS["optimizer state"]
COLOURS = {"weights": KINDS["weights"], "gradients": KINDS["gradients"], "codes": STATE, "scales": STATE}
#: Boxes of the upper part: heading, lines, and whether it is kept for the next step.
HOST = (
    ("gradient", ["param.grad of", "this step"], False),
    ("_C.Inputs", ["reads addresses, and", "compares all that the", "table points to"], True),
    ("batch", ["parameters of one", "device, with the", "call for them"], True),
    ("kernel table", ["a row per rectangle", "of a slice; addresses", "of gradients filled in"], True),
    ("kernel call", ["one per batch, for", "all its parameters"], True),
)
#: Boxes of the lower part.
BLOCK = {
    "decode": "codes and scales → moments, as float32",
    "update": "the rule (AdamW): moments and weights",
    "measure": "extremes of the block → new scales",
    "encode": "moments → codes",
}


def bytes_of(dtype: str, **options: object) -> dict[str, float]:
    """Bytes per parameter of AdamW by kind: weights, gradients, codes, scales."""
    model = Model.of_size("7B")
    use = estimate(model, Setup(dtype=dtype, options=options)).device
    kinds = {"weights": use.parameters, "gradients": use.gradients, "codes": use.state, "scales": use.scales}
    return {kind: nbytes / model.numel for kind, nbytes in kinds.items()}


def box(drawing: Drawing, x: float, y: float, width: float, height: float, colour: str, kept: bool) -> None:
    """A box, tinted where its content is kept from step to step."""
    style = {"fill": colour, "fill_opacity": "0.16"} if kept else {"fill": "none", "stroke_dasharray": "4 3"}
    drawing.rect(x, y, width, height, stroke=colour, rx="5", **style)


def draw_host(drawing: Drawing, y: float) -> None:
    """From the gradient to the kernel call, in boxes from left to right."""
    width, gap = 154, 17
    for index, (name, lines, kept) in enumerate(HOST):
        x = index * (width + gap) + 1
        box(drawing, x, y, width, 76, KINDS["gradients"] if index == 0 else GREY, kept)
        drawing.text(x + width / 2, y + 20, name, "middle", bold=True)
        drawing.lines(x + width / 2, y + 38, lines, "middle")
        if index:
            drawing.arrow((x - gap, y + 38), (x - 2, y + 38))


def draw_memory(drawing: Drawing, x: float, y: float, kind: str, size: float) -> None:
    """A box of what memory holds, with its bytes per parameter."""
    box(drawing, x, y, 150, 26, COLOURS[kind], kept=kind != "gradients")
    drawing.text(x + 10, y + 17, kind)
    drawing.text(x + 140, y + 17, f"{size:.2f}", "end", bold=True)


def draw_block(drawing: Drawing, y: float, sizes: dict[str, float]) -> None:
    """The step of a block, from memory on the left through registers to memory on the right."""
    left, right, begin, end, pitch = 1, 689, 232, 608, 74
    drawing.text(left, y, "memory, read", bold=True)
    drawing.text(right, y, "memory, written", bold=True)
    drawing.text((begin + end) / 2, y, "registers and cache, block by block", "middle", bold=True)
    y += 14
    reads = {"codes": 0.0, "scales": 30.0, "weights": pitch, "gradients": pitch + 30}
    writes = {"weights": pitch + 15, "scales": 2 * pitch + 15, "codes": 3 * pitch + 15}
    for kind, at in reads.items():
        draw_memory(drawing, left, y + at, kind, sizes[kind])
        drawing.arrow((left + 154, y + at + 13), (begin + 8, y + at + 13), stroke=COLOURS[kind])
    for kind, at in writes.items():
        draw_memory(drawing, right, y + at, kind, sizes[kind])
        drawing.arrow((end - 8, y + at + 13), (right - 4, y + at + 13), stroke=COLOURS[kind])
    for index, (name, line) in enumerate(BLOCK.items()):
        top = y + pitch * index
        box(drawing, begin + 12, top, end - begin - 24, 56, GREY, kept=False)
        drawing.text((begin + end) / 2, top + 22, name, "middle", bold=True)
        drawing.text((begin + end) / 2, top + 42, line, "middle", font_size=SMALL)
        if index:
            drawing.arrow(((begin + end) / 2, top - 17), ((begin + end) / 2, top - 2))
    top = y + 2 * pitch + 5
    drawing.rect(left, top, 200, 46, fill="none", stroke=PINK, rx="5")
    drawing.lines(left + 100, top + 19, ["cut blocks only: all-reduce", "of extremes with other ranks"], "middle")
    drawing.arrow((left + 204, top + 16), (begin + 8, top + 16), stroke=PINK)
    drawing.arrow((begin + 8, top + 30), (left + 204, top + 30), stroke=PINK)


def draw_bars(drawing: Drawing, y: float, setups: dict[str, dict[str, float]]) -> None:
    """Bytes read and written per parameter."""
    left = 300
    drawing.legend(left, y - 10, {kind: KINDS[kind] for kind in ("weights", "gradients", "optimizer state")})
    for name, sizes in setups.items():
        drawing.text(left - 70, y + 33, name, "end")
        written = {kind: size for kind, size in sizes.items() if kind != "gradients"}
        for verb, parts in (("read", sizes), ("written", written)):
            drawing.text(left - 10, y + 20, verb, "end")
            x = float(left)
            for kind, size in parts.items():
                drawing.rect(x, y + 7, UNIT * size, 18, fill=COLOURS[kind])
                x += UNIT * size
            drawing.text(x + 7, y + 20, f"{sum(parts.values()):.2f}", bold=True)
            y += 24
        y += 12
    drawing.text(left, y + 14, "bytes per parameter and step")


def figure() -> str:
    """The figure as SVG."""
    drawing = Drawing(WIDTH, "One step: from the gradient to the kernel call, and the memory that it reads and writes")
    sizes = bytes_of("bfloat16")
    drawing.text(1, 14, "On the host, once per step", bold=True)
    box(drawing, 540, 2, 16, 14, GREY, kept=True)
    drawing.text(564, 14, "kept between steps")
    box(drawing, 724, 2, 16, 14, GREY, kept=False)
    drawing.text(748, 14, "not kept")
    draw_host(drawing, 28)
    drawing.text(
        1, 142, "In the kernel: AdamW8bit, blocks of 128, bfloat16 weights; figures are bytes per parameter", bold=True
    )
    draw_block(drawing, 174, sizes)
    exact = bytes_of("float32", codec="fp32")
    draw_bars(drawing, 520, {"AdamW8bit, bfloat16 weights": sizes, "AdamW, all float32": exact})
    return drawing.svg(660)


if __name__ == "__main__":
    TARGET.write_text(figure())
