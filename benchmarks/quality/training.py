"""One run of the study: an optimizer, a task, a seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quality.choices import Choice
from quality.task import Problem, Task, lr_factor

#: Points of a training curve, each the mean of its share of the steps; fewer if there are fewer steps.
CURVE_POINTS = 20


#: (step, optimizer) -> figures of the optimizer's state after a marked step.
Look = Callable[[int, Optimizer], Mapping[str, float]]


def train(
    task: Task, problem: Problem, choice: Choice, seed: int, device: str, look: Look = lambda step, optimizer: {}
) -> dict[str, Any]:
    """Trains a model; a function of its arguments alone, whatever ran before in the process.

    A run ends early where its training loss is NaN or infinite, and has no held-out loss then. At the task's marked
    steps the held-out loss is taken, and what `look` says.

    Returns:
        The figures of the run, by name, for JSON.
    """
    begin = time.perf_counter()
    torch.manual_seed(seed)
    model = problem.model(seed).to(device)
    _disturb(model, choice.weight_noise, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(choice.weights)
    lr = task.lr * choice.lr_factor
    optimizer = choice.make(model, task, lr, choice.options)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[float] = []
    marks: list[dict[str, Any]] = []
    for step in range(1, task.steps + 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            _set_lr(group, peak * lr_factor(step, task.steps))
        losses.append(gradients(task, problem, model, seed, step))
        if not math.isfinite(losses[-1]):
            break
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(stepped, task.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step in task.marked_steps:
            model.eval()
            heldout = problem.evaluate(model)
            marks.append({"step": step, "loss": _finite(heldout), **look(step, optimizer)})
            model.train()
    heldout = math.nan
    if math.isfinite(losses[-1]):
        model.eval()
        heldout = problem.evaluate(model)
    numel = sum(parameter.numel() for parameter in stepped)
    state = state_bytes(optimizer)
    return {
        "lr": lr,
        "steps": task.steps,
        "finite": math.isfinite(heldout),
        "loss": _finite(heldout),
        "curve": _curve(losses, task.steps),
        **({"marks": marks} if task.marks else {}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": numel,
        "quantizable": sum(p.numel() for p in stepped if p.numel() >= task.quantize_from) / numel,
        "state_bytes": state / numel,
        "weight_bytes": sum(parameter.nbytes for parameter in stepped) / numel,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def gradients(task: Task, problem: Problem, model: nn.Module, seed: int, step: int) -> float:
    """Adds up the gradients of a step's micro-batches, up to the first without a finite loss.

    Returns:
        The mean of the micro-batches' losses.
    """
    total = 0.0
    for batch in range(task.micro_batches * (step - 1) + 1, task.micro_batches * step + 1):
        loss = problem.loss(model, seed, batch) / task.micro_batches
        total += loss.item()
        if not math.isfinite(total):
            break
        loss.backward()
    return total


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state without step counts and lookup tables, which do not grow with the model."""
    return sum(_nbytes(value) for state in optimizer.state.values() for value in _tensors(state))


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and not name.startswith("qmap"):
            yield value


def _nbytes(tensor: Tensor) -> int:
    """Of torchao's tensors, which consist of several, codes and scales."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in flatten()[0] if name != "qmap")


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


@torch.no_grad()
def _disturb(model: nn.Module, noise: float, seed: int) -> None:
    if not noise:
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            change = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + noise * change)


def _curve(losses: list[float], steps: int) -> list[float | None]:
    """Means of the training loss over equal shares of the steps; None from the first NaN on."""
    count = min(CURVE_POINTS, steps)
    points: list[float | None] = []
    for point in range(count):
        low, high = (round(edge * steps / count) for edge in (point, point + 1))
        part = losses[low:high]
        whole = len(part) == high - low and all(math.isfinite(loss) for loss in part)
        points.append(round(sum(part) / len(part), 6) if whole else None)
    return points
