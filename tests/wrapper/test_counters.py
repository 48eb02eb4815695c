"""Counters of an optimizer advance once per step, however many chunks a step has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from wrapped import parameters, quietly, trained


class Counting(Optimizer):
    """Counts steps in every place that there is."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "history": [0]})
        self.number = 0
        self.tensor = torch.tensor(0.0)
        self.nested: dict[str, Any] = {"k": 0, "list": [torch.zeros(1)]}
        self.seen: set[int] = set()
        self.by_param: dict[Parameter, int] = {}
        self.weights = params
        self.buffer = torch.zeros(64, 128)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        self.tensor += 1
        self.nested["k"] += 1
        self.nested["list"][0] += 1
        self.seen.add(len(self.seen))
        self.late = getattr(self, "late", 0) + 1
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["history"].append(group["k"])
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("moment", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    self.by_param[param] = self.by_param.get(param, 0) + 1
                    self.buffer.add_(1)


def counts(inner: Counting) -> list[Any]:
    (group,) = inner.param_groups
    counters = [inner.number, float(inner.tensor), inner.nested["k"], float(inner.nested["list"][0]), len(inner.seen)]
    return [*counters, inner.late, inner.state["global"], group["k"], group["history"], [*inner.by_param.values()]]


@pytest.mark.parametrize("working_memory", [0, None])
def test_one_step_is_one_step(working_memory: int | None) -> None:
    params, bare_params = parameters(), parameters()
    inner, bare = Counting(params), Counting(bare_params)
    held = [inner.tensor, inner.nested, inner.nested["list"], inner.nested["list"][0]]
    history = inner.param_groups[0]["history"]
    trained(quietly(inner, working_memory=working_memory), params)
    trained(bare, bare_params)
    assert counts(inner) == counts(bare)
    assert torch.equal(inner.buffer, bare.buffer)
    assert all(x is y for x, y in zip(inner.weights, params, strict=True))
    now = [inner.tensor, inner.nested, inner.nested["list"], inner.nested["list"][0]]
    assert all(x is y for x, y in zip(now, held, strict=True))
    assert inner.param_groups[0]["history"] is history
