"""No tensor of the package lies on the user's default device: meta tensors, which have no memory, would show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]


def _calls_without_device(tree: ast.AST) -> Iterator[ast.AST]:
    """Uses of torch's functions that make tensors on the default device if they get no ``device``."""
    names = {function.__name__ for function in _device_constructors()}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    told = [node for node in calls if any(keyword.arg == "device" for keyword in node.keywords)]
    right = {id(part) for node in told for part in (node.func, *node.args)}  # partial(torch.empty, device=...), too
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr in names and id(node) not in right:
                yield node
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and names & {x.name for x in node.names}:
            yield node


def test_every_new_tensor_has_a_device() -> None:
    """``device=None`` says that the user's default is meant."""
    for line in ("x = torch.zeros(3)", "f = partial(torch.empty, 3)", "from torch import tensor"):
        assert len(list(_calls_without_device(ast.parse(line)))) == 1, line
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "shardopt").rglob("*.py"))
        for node in _calls_without_device(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found
