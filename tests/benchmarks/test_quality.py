"""The study of training quality resumes, pairs runs by seed, computes intervals rightly, and runs from end to end."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import quality
from quality import intervals, records, run
from quality.choices import CHOICES, LONG, choice_of
from quality.compare import compare
from quality.over_time import courses
from quality.task import TASKS, Task, lr_factor
from quality.training import train
from reversal import Reversal, load

FOLDER = Path(quality.__file__).parent


def jobs_of(folder: Path, lr: float = 1e-2, optimizers: tuple[str, ...] = ("fp32", "log8")) -> list[run.Job]:
    task = Task("reversal", {}, steps=40, lr=lr, load=load)
    return run.study([task], list(optimizers), 2, "cpu", (folder, folder))


def made(jobs: list[run.Job], stop_after: int | None = None) -> list[tuple[str, int]]:
    """Runs what is pending, at most so many; optimizer and seed of each run."""
    done = []
    for job, record in run.finished(run.pending(jobs)[:stop_after], workers=1):
        records.append(job.path, record)
        done.append((job.optimizer, job.seed))
    return done


def test_a_cut_off_study_goes_on_seed_by_seed(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path)
    (path,) = {job.path for job in jobs}
    assert made(jobs, stop_after=2) == [("fp32", 0), ("log8", 0)]
    with path.open("a") as file:
        file.write('{"task": "rever')  # killed in the middle of a line
    records.repair(path)
    assert made(jobs) == [("fp32", 1), ("log8", 1)]
    assert made(jobs) == []
    assert len(records.read(path)) == 4
    assert len(run.pending(jobs_of(tmp_path, lr=2e-2))) == 4  # another task
    records.drop(path, ["log8"])
    assert made(jobs) == [("log8", 0), ("log8", 1)]


def _line(optimizer: str, seed: int, loss: float | None, digest: str = "now") -> records.Record:
    known = {"task": "bytes", "optimizer": optimizer, "seed": seed, "digest": digest, "loss": loss}
    size = {"state_bytes": 2.0, "weight_bytes": 4.0, "steps": 1, "parameters": 8, "trained": 8, "quantizable": 1.0}
    run = {"options": CHOICES[optimizer].options, "lr": 1e-3, "finite": loss is not None, "curve": [3.0, 2.0]}
    return {**known, **size, **run, "seconds": 1.0}


def test_differences_are_of_the_same_seed() -> None:
    """Losses differ by 1% and 3% of the same seed's; seeds without a partner and other definitions stay out."""
    losses = {"fp32": {0: 2.0, 1: 4.0, 2: 8.0, 3: None}, "log8": {0: 2.02, 1: 4.12, 3: 9.0, 4: 9.0, 2: None}}
    lines = [_line("log8", 0, 99.0, digest="before")]
    lines += [_line(name, seed, loss) for name, of_seed in losses.items() for seed, loss in of_seed.items()]
    exact, coded = compare(lines)
    assert (exact.name, exact.difference, exact.diverged) == ("fp32", None, 1)
    assert (coded.name, coded.runs, coded.diverged, coded.verdict) == ("log8", 5, 1, "no")
    found = coded.difference
    assert found is not None
    assert (found.count, found.mean) == (2, pytest.approx(2.0))
    assert found.spread == pytest.approx(math.sqrt(2))
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)
    assert found.t == pytest.approx((2 - half, 2 + half), abs=1e-3)


def test_verdicts_need_the_whole_interval_and_five_pairs() -> None:
    """Differences of mean 0.2% and a half width of 0.062%: yes; shifted by 0.2%: no; between the two: open."""

    def verdict(shift: float, pairs: int = 5) -> str:
        steps = [-0.05, -0.05, 0.0, 0.05, 0.05][:pairs]
        lines = [_line("fp32", seed, 2.0) for seed in range(pairs)]
        lines += [_line("log8", seed, 2.0 * (1 + (0.2 + shift + step) / 100)) for seed, step in enumerate(steps)]
        return compare(lines)[1].verdict

    assert [verdict(shift) for shift in (0.0, 0.1, 0.2)] == ["yes", "open", "no"]
    assert verdict(-5.0, pairs=4) == "open"


def test_courses_pair_seeds_and_steps() -> None:
    """Differences of 1% at 20% of the steps and of 3% at the end have grown by 2; marks without a partner stay out."""

    def line(optimizer: str, seed: int, losses: dict[int, float | None]) -> records.Record:
        marks = [{"step": step, "loss": loss} for step, loss in losses.items()]
        return {**_line(optimizer, seed, None), "steps": 40, "marks": marks}

    lines = [line("fp32", seed, {2: 8.0, 8: 4.0, 40: 2.0}) for seed in (0, 1, 2)]
    lines += [line("log8", seed, {2: 8.0, 8: 4.04, 40: 2.06}) for seed in (0, 1)]
    lines += [line("log8", 2, {2: 8.0, 8: None}), line("log8", 3, {2: 9.0})]
    (course,) = courses(lines)
    assert {step: found.count for step, found in course.differences.items()} == {2: 3, 8: 2, 40: 2}
    assert [found.mean for found in course.differences.values()] == pytest.approx([0, 1, 3])
    assert course.rise is not None
    assert (course.rise.count, course.rise.mean) == (2, pytest.approx(2))


def test_quantiles_of_t() -> None:
    """The usual table, to its last digit."""
    table = {1: 12.7062, 4: 2.7764, 9: 2.2622, 19: 2.0930, 120: 1.9799}
    assert {degrees: round(intervals.t_quantile(degrees), 4) for degrees in table} == table
    assert round(intervals.t_quantile(7, 0.99), 4) == 3.4995


def test_bootstrap_of_a_known_distribution() -> None:
    """The mean of four draws from (0, 0, 0, 1) is a quarter of a binomial number: 97.5% of it lie at 3/4 or below."""
    found = intervals.summary([0.0, 0.0, 0.0, 1.0])
    assert found.bootstrap == (0.0, 0.75)
    assert intervals.summary([5.0, 5.0, 5.0]).bootstrap == (5.0, 5.0)


LONG_TASK = Task("long", {}, steps=40, lr=1e-2, load=load, micro_batches=2, clip=0.05, marks=(0.05, 0.2, 1.0))


def test_a_step_has_the_clipped_mean_gradient_of_its_micro_batches() -> None:
    """Against a loop of plain PyTorch, all of whose steps are clipped."""
    problem, model = Reversal(), Reversal().model(3)
    figures = train(LONG_TASK, problem, choice_of("fp32"), 3, "cpu")
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


@pytest.mark.slow
def test_quick_mode_from_end_to_end(tmp_path: Path) -> None:
    """Every optimizer on every task, then tables and figures."""
    results = tmp_path / "results"
    options = ["--mode", "quick", "--workers", "2", "--results", str(results)]
    _script("run.py", *options, "--seeds", "2")
    _script("updates.py", "--steps", "250", "--results", str(results))
    assert {path.stem for path in results.glob("*.jsonl")} == {*TASKS, "streams", "levels", "updates"}
    for task in TASKS:
        lines = records.read(results / f"{task}.jsonl")
        assert {line["seed"] for line in lines} == {0, 1}
        expected = {"fp32", "fp32_lr", "fp32_init", "log8", "companded8", "dynamic8"}
        expected |= {"log8_half", "log8_double"} if task == LONG else {"muon8"}
        assert expected <= {line["optimizer"] for line in lines if line["finite"]}
    assert re.search(r"(\d+) of \1 runs are there", _script("run.py", *options, "--seeds", "1"))
    page = (FOLDER.parents[1] / "docs" / "quality.md").read_text()
    (tmp_path / "quality.md").write_text(page)
    shutil.copy(FOLDER / "results" / "tables.md", results)
    _script("report.py", "--results", str(results), "--docs", str(tmp_path))
    assert (tmp_path / "quality.md").read_text() != page
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"quality-{name}.svg" for name in ("intervals", "streams", "levels", "updates", "course", "drift")
    }


def _script(name: str, *options: str) -> str:
    command = [sys.executable, str(FOLDER / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
