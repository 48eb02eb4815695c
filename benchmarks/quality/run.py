"""Trains the optimizers of the study on its tasks; appends a JSON line per run, and skips runs that have theirs.

    python benchmarks/quality/run.py [--mode quick|full] [--tasks NAME ...] [--optimizers NAME ...] [--seeds N]
                                     [--workers N] [--size small|large] [--device cpu|cuda]
    python benchmarks/quality/run.py --tune LR ...      AdamW with float32 state at these learning rates, two seeds
    python benchmarks/quality/run.py --redo NAME ...    first discards the results of optimizers whose code changed

Cut off, the same command goes on where it stopped. Runs go seed by seed, so that a part of the study is balanced.
``--mode quick`` tries everything in minutes: a tenth of the steps, two seeds, results in a temporary folder. Tables and
figures: report.py; what they mean: docs/quality.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    _BENCHMARKS = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "launch")]

import torch

from quality import drift, levels, records
from quality.choices import CHOICES, choice_of
from quality.moments import Kept
from quality.task import SIZES, TASKS, Problem, Task, task_of
from quality.training import Look, train

RESULTS = Path(__file__).parent / "results"
TUNING_SEEDS = 2
QUICK_SEEDS = 2
QUICK_SHARE = 10
QUICK_STEPS = 50
QUICK_ROWS = 8


class Job(NamedTuple):
    """A run to come, and the file for its line; plain values, which can be sent to another process."""

    task: Task
    optimizer: str
    seed: int
    device: str
    cache: Path
    path: Path


def problem_of(task: Task, folder: Path) -> Problem:
    """The task's problem, loaded once per process; `folder` keeps files that take long to make."""
    return _loaded(task.load, tuple(sorted(task.settings.items())), folder)


@cache
def _loaded(load: Callable[..., Problem], settings: tuple[tuple[str, Any], ...], folder: Path) -> Problem:
    folder.mkdir(parents=True, exist_ok=True)
    return load(dict(settings), folder)


@cache
def _commit() -> str:
    """The last commit that changed the package."""
    root = Path(__file__).parents[2]
    command = ["git", "log", "-1", "--format=%h", "--", "shardopt", "csrc"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def identity(job: Job) -> records.Record:
    """The part of a line that is known before the run, and tells whether it was made already."""
    choice = choice_of(job.optimizer)
    return {
        "task": job.task.name,
        "optimizer": job.optimizer,
        "seed": job.seed,
        "digest": job.task.digest(problem_of(job.task, job.cache)),
        "options": choice.options,
        "lr": job.task.lr * choice.lr_factor,
    }


def run_job(job: Job) -> records.Record:
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    choice, problem = choice_of(job.optimizer), problem_of(job.task, job.cache)
    figures = train(job.task, problem, choice, job.seed, job.device, _look(job))
    return {**identity(job), **figures, "device": job.device, "torch": torch.__version__, "shardopt": _commit()}


def _look(job: Job) -> Look:
    """Keeps the moments of a float32 run at marked steps; tells the drift from them of another one."""
    baseline = job._replace(optimizer=choice_of(job.optimizer).baseline)
    key = hashlib.sha256(repr(records.key_of(identity(baseline))).encode()).hexdigest()[:16]
    kept = Kept(job.cache / f"moments-{key}")
    if job.optimizer == baseline.optimizer:
        return kept.keep
    if job.task.marks and not kept.path(job.task.marked_steps[-1]).exists():
        run_job(baseline)  # its line may be there while the cache is gone
    return kept.drift


def pending(jobs: list[Job]) -> list[Job]:
    """The jobs that have no line yet, in their order."""
    made = {records.key_of(record) for path in {job.path for job in jobs} for record in records.read(path)}
    return [job for job in jobs if records.key_of(identity(job)) not in made]


def finished(jobs: list[Job], workers: int) -> Iterator[tuple[Job, records.Record]]:
    """Runs the jobs, in processes of their own if `workers` is above 1; yields each when it and those before ended."""
    if workers == 1:
        for job in jobs:
            yield job, run_job(job)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from zip(jobs, pool.imap(run_job, jobs), strict=True)


def study(
    tasks: list[Task], optimizers: list[str], seeds: int | None, device: str, folders: tuple[Path, Path]
) -> list[Job]:
    """The runs of the study, seed by seed; says of each optimizer that cannot take part why.

    Args:
        tasks: what to train.
        optimizers: with what.
        seeds: how many, from 0; None for as many as each task says.
        device: "cpu" or "cuda".
        folders: of cached files, of results.
    """
    cached, results = folders
    able: list[tuple[Task, str]] = []
    for task in tasks:
        for name in optimizers:
            obstacle = choice_of(name).obstacle(task)
            if obstacle is None:
                able.append((task, name))
            else:
                print(f"left out: {name} on {task.name}: {obstacle}", flush=True)
    return [
        Job(task, name, seed, device, cached, results / f"{task.name}.jsonl")
        for seed in range(seeds or max(task.seeds for task in tasks))
        for task, name in able
        if seeds or seed < task.seeds
        if seed < (choice_of(name).seeds or seed + 1)
    ]


def drifts(path: Path, rows: int) -> None:
    """Appends the drift of each optimizer on each stream of gradients of so many rows, where the file lacks it."""
    records.repair(path)
    made = {(line["scenario"], line["optimizer"]) for line in records.read(path)}
    able = [name for name in drift.NAMES if CHOICES[name].obstacle(drift.STREAM) is None]
    for scenario in drift.SCENARIOS:
        names = [name for name in able if (scenario, name) not in made]
        for line in drift.measure(scenario, names, rows) if names else ():
            records.append(path, line)
            print(f"stream {scenario}, {line['optimizer']}: {line['mean'][-1]}", flush=True)


def moment_levels(path: Path, steps: int) -> None:
    """Appends the level of each optimizer's second moment on each stream of so many steps, where the file lacks it."""
    records.repair(path)
    made = {(line["stream"], line["beta2"], line["optimizer"]) for line in records.read(path)}
    able = [name for name in levels.NAMES if choice_of(name).obstacle(drift.STREAM) is None]
    for stream, beta2 in itertools.product(levels.STREAMS, levels.BETAS2):
        names = [name for name in able if (stream, beta2, name) not in made]
        for line in levels.measure(stream, beta2, names, steps) if names else ():
            records.append(path, line)
            print(f"levels, {stream}, {beta2}, {line['optimizer']}: {line['levels'][-1]}", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("quick", "full"), default="full")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", default=list(CHOICES), metavar="NAME")
    parser.add_argument("--seeds", type=int, help=f"default: 20, of long 10; {QUICK_SEEDS} in quick mode")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--streams",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="at the end also the drift of free-running optimizers, and the levels of their second moments",
    )
    parser.add_argument("--tune", nargs="+", type=float, metavar="LR")
    parser.add_argument("--redo", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--results", type=Path, help="folder (default: results/ beside this file, results/large)")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "shardopt-quality"))
    given = parser.parse_args(argv)
    for name in given.optimizers:
        try:
            choice_of(name)
        except ValueError as error:
            parser.error(str(error))
    return given


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """The runs that the options name."""
    tasks = [task_of(name, given.size) for name in given.tasks]
    results = given.results or (RESULTS if given.size == "small" else RESULTS / given.size)
    optimizers, seeds = given.optimizers, given.seeds
    if given.mode == "quick":
        results = given.results or Path(tempfile.mkdtemp(prefix="shardopt-quality-"))
        tasks = [dataclasses.replace(task, steps=min(task.steps // QUICK_SHARE, QUICK_STEPS)) for task in tasks]
        seeds = given.seeds or QUICK_SEEDS
    if given.tune:
        tasks = [dataclasses.replace(task, lr=lr) for task in tasks for lr in given.tune]
        results, optimizers, seeds = results / "tuning", ["fp32"], given.seeds or TUNING_SEEDS
    return study(tasks, optimizers, seeds, given.device, (given.cache, results))


def main(argv: list[str]) -> None:
    given = parse(argv)
    torch.set_num_threads(1)
    jobs = jobs_of(given)
    for path in {job.path for job in jobs}:
        records.repair(path)
        if given.redo:
            records.drop(path, given.redo)
    left = pending(jobs)
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are there; results: {jobs[0].path.parent}", flush=True)
    for number, (job, record) in enumerate(finished(left, given.workers), 1):
        records.append(job.path, record)
        loss = "diverged" if record["loss"] is None else f"{record['loss']:.5f}"
        run = f"{job.task.name} {job.optimizer} seed {job.seed} lr {record['lr']:.3g}"
        print(f"{number}/{len(left)} {run}: {loss}, {record['seconds']} s", flush=True)
    if given.streams and not given.tune:
        quick, folder = given.mode == "quick", jobs[0].path.parent
        drifts(folder / "streams.jsonl", QUICK_ROWS if quick else drift.ROWS)
        moment_levels(folder / "levels.jsonl", levels.MARKS[0] if quick else levels.STEPS)


if __name__ == "__main__":
    main(sys.argv[1:])
