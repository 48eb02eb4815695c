"""Long runs of the study: clipped steps of several micro-batches, marks, drift of the moments, and restarts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quality import records
from quality.choices import choice_of
from quality.over_time import courses
from quality.task import Task, lr_factor
from quality.training import train
from reversal import Reversal, load

LONG = Task("long", {}, steps=40, lr=1e-2, load=load, micro_batches=2, clip=0.05, marks=(0.05, 0.2, 1.0))


def test_a_step_has_the_clipped_mean_gradient_of_its_micro_batches() -> None:
    """Against a loop of plain PyTorch, all of whose steps are clipped."""
    problem, model = Reversal(), Reversal().model(3)
    figures = train(LONG, problem, choice_of("fp32"), 3, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    losses = {}
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 1e-2 * lr_factor(step, 40)
        optimizer.zero_grad()
        for batch in (2 * step - 1, 2 * step):
            problem.loss(model, 3, batch).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        optimizer.step()
        losses[step] = problem.evaluate(model)
    assert [mark["step"] for mark in figures["marks"]] == [2, 8, 40]
    for mark in figures["marks"]:
        assert mark["loss"] == pytest.approx(losses[mark["step"]], rel=1e-5)
    assert figures["loss"] == figures["marks"][-1]["loss"]


def test_courses_pair_seeds_and_steps() -> None:
    """Differences of 1% at 20% of the steps and of 3% at the end have grown by 2; marks without a partner stay out."""

    def line(optimizer: str, seed: int, losses: dict[int, float | None]) -> records.Record:
        marks = [{"step": step, "loss": loss} for step, loss in losses.items()]
        known = {"optimizer": optimizer, "seed": seed, "digest": "now", "options": choice_of(optimizer).options}
        return {**known, "steps": 40, "marks": marks}

    lines = [line("fp32", seed, {2: 8.0, 8: 4.0, 40: 2.0}) for seed in (0, 1, 2)]
    lines += [line("log8", seed, {2: 8.0, 8: 4.04, 40: 2.06}) for seed in (0, 1)]
    lines += [line("log8", 2, {2: 8.0, 8: None}), line("log8", 3, {2: 9.0})]
    (course,) = courses(lines)
    assert {step: found.count for step, found in course.differences.items()} == {2: 3, 8: 2, 40: 2}
    assert [found.mean for found in course.differences.values()] == pytest.approx([0, 1, 3])
    assert course.rise is not None
    assert (course.rise.count, course.rise.mean) == (2, pytest.approx(2))
