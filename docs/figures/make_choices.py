"""Draws choices.svg: which optimizer and options to take, question by question.

python docs/figures/make_choices.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from drawing import BLUE, GREY, SMALL, Drawing

TARGET = Path(__file__).with_name("choices.svg")
WIDTH, LEFT, ASKED, BOX, ROW = 840, 10, 270, 520, 40  # pixels; questions end at ASKED, results begin at BOX


class Question(NamedTuple):
    """A question: results by answer, and the answer that leads to the next question."""

    text: str
    results: dict[str, str]
    otherwise: str


#: By what is chosen. After the last question of a part the next part begins.
PARTS = {
    "1. State, in bytes per parameter": (
        Question("State exact, as a baseline?", {"yes": "AdamW: 8 bytes"}, "no"),
        Question(
            "State to take over?",
            {
                "of bitsandbytes": "codec='dynamic8', block_size=256",
                "of FlashOptim": "codec='companded8', block_size=32",
            },
            "none",
        ),
        Question(
            "One byte less, as an experiment?",
            {"yes": "AdamW4bit: 1.1 bytes", "no": "AdamW8bit: 2.1 bytes"},
            "",
        ),
    ),
    "2. Weights": (
        Question(
            "Weights of 16 bits?",
            {"yes, and a byte for precision": "master_weight_bits=24", "bf16, and no byte": "stochastic_rounding=True"},
            "",
        ),
    ),
    "3. Memory": (
        Question(
            "Still too large?",
            {
                "gradients are": "release_gradients(model, optimizer)",
                "state is, the host has many cores": "offload='step'",
                "state is, the host has few": "offload='state'",
            },
            "",
        ),
    ),
}


def figure() -> str:
    """The figure as SVG."""
    drawing = Drawing(WIDTH, "Questions that lead to an optimizer and its options")
    y = 0.0
    for part, questions in PARTS.items():
        drawing.text(LEFT, y + 20, part, bold=True)
        y += 32
        for text, results, otherwise in questions:
            drawing.rect(LEFT, y, ASKED - LEFT, 30, rx="15", fill="none", stroke=BLUE)
            drawing.text((LEFT + ASKED) / 2, y + 19, text, "middle")
            for index, (answer, result) in enumerate(results.items()):
                middle = y + index * ROW + 15
                if index:
                    drawing.line([(ASKED + 12, middle - ROW), (ASKED + 12, middle)])
                drawing.arrow((ASKED + 12 if index else ASKED, middle), (BOX, middle))
                drawing.text(ASKED + 20, middle - 4, answer, font_size=SMALL)
                drawing.rect(BOX, middle - 15, WIDTH - LEFT - BOX, 30, fill="none", stroke=GREY)
                drawing.text(BOX + 10, middle + 4, result)
            end = y + len(results) * ROW
            if otherwise:
                drawing.arrow((LEFT + 40, y + 30), (LEFT + 40, end + 12))
                drawing.text(LEFT + 48, (y + end) / 2 + 25, otherwise, font_size=SMALL)
                end += 12
            y = end
        y += 8
    return drawing.svg(round(y))


if __name__ == "__main__":
    TARGET.write_text(figure())
