"""Draws calls-step.svg, calls-save.svg and calls-load.svg: the files that a step, a save and a load go through.

    python docs/figures/trace_calls.py

Runs each on a small model and watches which file of shardopt calls which. A file stands below the file that called it
first, with the first sentence of its docstring. Rooms that are not the figure's subject have one row each.
"""

from __future__ import annotations

import ast
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shardopt
import shardopt.checkpoint
from drawing import BLUE, GREEN, GREY, ORANGE, PINK, SMALL, VIOLET, Drawing

FOLDER = Path(__file__).parent
PACKAGE = Path(shardopt.__file__).parent
KERNELS = "_C"
WIDTH, ROW, INDENT, LETTER = 840, 27, 18, 7.9  # pixels
COLOURS = {"checkpoint": BLUE, "step": BLUE, "optim": ORANGE, "state": GREEN, "layout": VIOLET, "codec": PINK}
#: Titles by figure, and the rooms that have a row for each of their files.
FIGURES = {
    "step": ("One step: optimizer.step()", {"optim", "step", "kernels", "state"}),
    "save": ("One save: shardopt.checkpoint.save()", {"checkpoint"}),
    "load": ("One load: shardopt.checkpoint.load()", {"checkpoint"}),
}


@dataclass
class Node:
    """A file, or a room, in the tree of first calls.

    Attributes:
        name: the file's path in the package; of a room, with a slash at the end.
        file: the first file of the room that was called.
    """

    name: str
    file: str
    children: list[Node] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """Depths and nodes, callers first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def trace(function: Callable[[], object], rooms: set[str]) -> Node:
    """The tree of a function's second call: the first one makes and imports what is kept."""
    nodes: dict[str, Node] = {}
    stack = [Node("", "")]

    def call(file: str) -> Node:
        room = file.partition("/")[0]
        name = file if room in rooms or "/" not in file else f"{room}/"
        if name not in nodes:
            nodes[name] = Node(name, file)
            stack[-1].children.append(nodes[name])
        return nodes[name]

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "c_call" and getattr(argument, "__module__", None) == f"shardopt.{KERNELS}":
            call(f"{KERNELS}.{argument.__name__}")
        elif event in ("call", "return") and file.is_relative_to(PACKAGE) and frame.f_code.co_name != "<module>":
            if event == "call":
                stack.append(call(file.relative_to(PACKAGE).as_posix()))
            else:
                stack.pop()

    function()
    gc.disable()  # no finalizers in between
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    (root,) = stack[0].children
    return root


def trees() -> dict[str, Node]:
    """The trees of all figures."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    optimizer = shardopt.AdamW8bit(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            "step": optimizer.step,
            "save": lambda: shardopt.checkpoint.save(f"{folder}/checkpoint", model, optimizer),
            "load": lambda: shardopt.checkpoint.load(f"{folder}/checkpoint", model, optimizer),
        }
        return {name: trace(call, FIGURES[name][1]) for name, call in calls.items()}


def purpose(node: Node) -> str:
    """The first sentence of a file's or a room's docstring."""
    if node.name.startswith(KERNELS):
        return "compiled, csrc/"
    path = PACKAGE / (f"{node.name}__init__.py" if node.name.endswith("/") else node.name)
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".").replace("``", "").replace("`", "")


def imports(node: Node) -> set[str]:
    """The modules of shardopt that a file imports, and the names that it takes from them, with dots."""
    names = set()
    if not node.name.startswith(KERNELS):
        for statement in ast.walk(ast.parse((PACKAGE / node.file).read_text())):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                names |= {f"{statement.module}.{alias.name}" for alias in statement.names} | {statement.module}
            elif isinstance(statement, ast.Import):
                names |= {alias.name for alias in statement.names}
    return names


def is_imported(node: Node, caller: Node) -> bool:
    """Whether the caller's file imports the node's file, or anything of the node's room."""
    if node.name.startswith(KERNELS):
        return f"shardopt.{KERNELS}" in imports(caller)
    module = "shardopt." + node.name.removesuffix("/").removesuffix(".py").replace("/", ".")
    module = module.removesuffix(".__init__")
    return any(f"{name}.".startswith(f"{module}.") for name in imports(caller))


def draw(title: str, root: Node) -> str:
    """The figure of a tree."""
    drawing = Drawing(WIDTH, title)
    rows = list(root.walk())
    places = {id(node): (depth * INDENT + 1, 44 + index * ROW) for index, (depth, node) in enumerate(rows)}
    drawing.text(1, 16, title, bold=True)
    drawing.line([(WIDTH - 414, 12), (WIDTH - 384, 12)])
    drawing.text(WIDTH - 378, 16, "calls what it imports", font_size=SMALL)
    drawing.line([(WIDTH - 226, 12), (WIDTH - 196, 12)], stroke_dasharray="2 3")
    drawing.text(WIDTH - 190, 16, "calls an object it was given", font_size=SMALL)
    for _, node in rows:
        x, y = places[id(node)]
        for child in node.children:
            below, level = places[id(child)]
            style = {} if is_imported(child, node) else {"stroke_dasharray": "2 3"}
            drawing.line([(x + 9, y + 10), (x + 9, level), (below, level)], stroke_opacity="0.6", **style)
    for _, node in rows:
        x, y = places[id(node)]
        colour = COLOURS.get(node.name.partition("/")[0], GREY)
        width = LETTER * len(node.name) + 14
        drawing.rect(x, y - 10, width, 20, stroke=colour, fill=colour, fill_opacity="0.16", rx="4")
        drawing.text(x + 7, y + 4.5, node.name)
        left = int((WIDTH - x - width - 10) / 7.3)
        text = purpose(node)
        drawing.text(x + width + 9, y + 4.5, text if len(text) <= left else text[: left - 1] + "…", font_size=SMALL)
    return drawing.svg(44 + len(rows) * ROW - 8)


def main() -> None:
    """Writes the figures."""
    for name, root in trees().items():
        (FOLDER / f"calls-{name}.svg").write_text(draw(FIGURES[name][0], root))


if __name__ == "__main__":
    main()
