"""Long runs of the study: clipped steps of several micro-batches, marks, drift of the moments, and restarts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from quality import levels, records, run
from quality.choices import IN_LONG_RUNS, LOG8_AT_RANDOM, choice_of
from quality.moments import Moments, drift, moments_of
from quality.over_time import courses
from quality.report import course_table, drift_table, levels_table
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


def test_short_tasks_keep_the_digests_of_lines_made_before() -> None:
    """Lines from before there were micro-batches stay comparable; another number of them is another task."""
    task = Task("short", {"dim": 1}, steps=5, lr=1e-3, load=load)
    expected = {"name": "short", "settings": {"dim": 1}, "steps": 5, "lr": 1e-3, "quantize_from": 4096}
    expected |= {"shared": [(0.9, 0.999), 1e-8, 0.01, 0.1, 0.1], "data": "reversal", "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()[:16]
    assert task.digest(Reversal()) == digest
    others = [dataclasses.replace(task, micro_batches=2), dataclasses.replace(task, clip=1.0)]
    assert len({it.digest(Reversal()) for it in (task, *others)}) == 3


@pytest.mark.parametrize("name", ["fp32", "log8", LOG8_AT_RANDOM, "companded8", "dynamic8", "log4", "bnb8"])
def test_decoded_moments_are_near_plain_ones(name: str) -> None:
    """After steps on one stream of gradients, a codec's moments are those of float32 within its step."""
    if choice_of(name).obstacle(LONG) is not None:
        pytest.skip(f"{choice_of(name).obstacle(LONG)}")
    exact, coded = (_after_steps(it) for it in ("fp32", name))
    assert exact["exp_avg"].shape == coded["exp_avg"].shape == (64 * 96 + 7,)
    found = drift(coded, exact)
    most = {"fp32": 0.0, "log4": 0.5}.get(name, 0.03)
    assert (found["exp_avg"] > 0) == (found["exp_avg_sq"] > 0) == (name != "fp32")
    assert max(found["exp_avg"], found["exp_avg_sq"]) <= most
    assert found["exp_avg_norm"] == pytest.approx(1, abs=most)
    assert found["exp_avg_sq_norm"] == pytest.approx(1, abs=most)


def _after_steps(name: str) -> Moments:
    """Moments after five steps on random gradients, of a matrix that is quantized and a vector that is not."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 96)), nn.Parameter(torch.zeros(7))])
    optimizer = choice_of(name).make(model, LONG, 1e-3, choice_of(name).options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return moments_of(optimizer)


def test_drift_of_known_moments() -> None:
    exact = {"exp_avg": torch.tensor([3.0, 4.0]), "exp_avg_sq": torch.tensor([1.0, 0.0])}
    ours = {"exp_avg": torch.tensor([3.0, 3.0]), "exp_avg_sq": torch.tensor([0.5, 0.0])}
    expected = {"exp_avg": 0.2, "exp_avg_norm": 0.84853, "exp_avg_sq": 0.5, "exp_avg_sq_norm": 0.5}
    assert drift(ours, exact) == pytest.approx(expected, abs=1e-5)


def test_levels_of_the_second_moment_are_those_of_a_codec() -> None:
    """bf16's, which cannot fall by 0.1%, rises; log8's does not; no level depends on another."""
    alone, both = (levels.measure("normal", 0.999, names, 1000) for names in (["bf16"], ["log8", "bf16"]))
    assert both[1] == alone[0]
    assert alone[0]["steps"] == [250, 1000]
    assert 1.001 < alone[0]["levels"][0] < alone[0]["levels"][1]
    assert both[0]["levels"] == pytest.approx([1, 1], abs=0.003)
    faster = levels.measure("normal", 0.95, ["bf16"], 1000)
    assert faster[0]["levels"] == pytest.approx([1, 1], abs=0.003)
    table = levels_table([*both, *faster]).splitlines()
    assert table[0] == "| stream | optimizer | step 250 | step 1,000 | `betas[1] = 0.95` |"
    assert re.fullmatch(r"\| normal \| AdamW, log8 \| \S+ \| \S+ \|  \|", table[2])
    assert re.fullmatch(r"\| normal \| AdamW, bf16 \| 1\.\d+ \| 1\.\d+ \| (1.00\d|0.99\d) \|", table[3])


def test_random_rounding_keeps_the_level_that_rounding_to_nearest_loses() -> None:
    """Gradients with heavy tails, whose rare large ones raise a second moment that then falls by steps of 0.1%."""
    nearest, at_random = levels.measure("heavy-tailed", 0.999, ["log8", LOG8_AT_RANDOM], 2000)
    assert nearest["levels"][-1] > 1.02
    assert at_random["levels"] == pytest.approx([1] * len(at_random["steps"]), abs=0.003)


def _lines(folder: Path, *optimizers: str) -> list[records.Record]:
    jobs = run.study([LONG], list(optimizers), 2, "cpu", (folder, folder))
    for job, record in run.finished(run.pending(jobs), workers=1):
        records.append(job.path, record)
    return records.read(jobs[0].path)


def test_drift_does_not_depend_on_a_cache(tmp_path: Path) -> None:
    """The moments of a float32 run whose line is there while its files are gone are made anew."""
    lines = _lines(tmp_path, "fp32", "log8")
    for path in tmp_path.glob("moments-*"):
        shutil.rmtree(path)
    records.drop(tmp_path / "long.jsonl", ["log8"])
    again = _lines(tmp_path, "fp32", "log8")
    assert len(again) == len(lines) == 4
    of = {(line["optimizer"], line["seed"]): line["marks"] for line in lines}
    assert {(line["optimizer"], line["seed"]): line["marks"] for line in again} == of
    assert "exp_avg" not in of["fp32", 0][0]
    assert of["log8", 0][0]["exp_avg"] > 0
    assert of["log8", 0] != of["log8", 1]


def test_courses_pair_seeds_and_steps() -> None:
    """Differences of 1% at 20% of the steps and of 3% at the end have grown by 2; marks without a partner stay out."""

    def line(optimizer: str, seed: int, losses: dict[int, float | None], **figures: float) -> records.Record:
        marks = [{"step": step, "loss": loss, **figures} for step, loss in losses.items()]
        known = {"optimizer": optimizer, "seed": seed, "digest": "now", "options": choice_of(optimizer).options}
        return {**known, "steps": 40, "marks": marks}

    moments = {"exp_avg": 0.1, "exp_avg_norm": 1.0, "exp_avg_sq": 0.2, "exp_avg_sq_norm": 0.9}
    lines = [line("fp32", seed, {2: 8.0, 8: 4.0, 40: 2.0}) for seed in (0, 1, 2)]
    lines += [line("log8", seed, {2: 8.0, 8: 4.04, 40: 2.06}, **moments) for seed in (0, 1)]
    lines += [line("log8", 2, {2: 8.0, 8: None}, **moments), line("log8", 3, {2: 9.0}, **moments)]
    (course,) = courses(lines)
    assert {step: found.count for step, found in course.differences.items()} == {2: 3, 8: 2, 40: 2}
    assert [found.mean for found in course.differences.values()] == pytest.approx([0, 1, 3])
    assert course.rise is not None
    assert (course.rise.count, course.rise.mean) == (2, pytest.approx(2))
    assert course_table([course]).splitlines()[-1].startswith("| AdamW, log8 | 3 | +0.00 ± 0.00 | +1.00 ± 0.00 | +3.00")
    assert drift_table([course]).splitlines()[-3:] == [
        "| AdamW, log8 | `exp_avg`, distance | 0.100 | 0.100 | 0.100 |",
        "| AdamW, log8 | root of `exp_avg_sq`, distance | 0.200 | 0.200 | 0.200 |",
        "| AdamW, log8 | root of `exp_avg_sq`, ratio of norms | 0.900 | 0.900 | 0.900 |",
    ]


def test_who_takes_part_in_long_runs() -> None:
    jobs = run.jobs_of(run.parse(["--tasks", "long"]))
    runs = Counter(job.optimizer for job in jobs)
    rates = {"fp32_half", "log8_half", "fp32_double", "log8_double"}
    assert runs.keys() - {"bnb8"} == {*IN_LONG_RUNS, *rates} - {"bnb8"}
    assert {runs[name] for name in rates} == {5}
    assert {runs[name] for name in runs.keys() - rates} == {10}
    assert rates.isdisjoint(job.optimizer for job in run.jobs_of(run.parse(["--tasks", "bytes"])))
