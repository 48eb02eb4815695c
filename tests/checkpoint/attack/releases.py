"""Trains random models with released gradients beside ordinary steps, through failures, discards and removals.

Failed backward passes are mirrored: the ordinary run steps the parameters that were stepped meanwhile, with its own
gradients. So all bits must be the same at all times.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import warnings
import weakref
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from attack.forked import Outcome, call, fault, ok, shown
from ranks.offload import offload_from_cpu, slow_steps
from ranks.snapshot import assert_same, local

STEPS = 6
#: Events of a step, the first of which is an ordinary one.
EVENTS = ("step", "step", "forward fails", "backward fails", "hook fails", "two passes", "removed", "removed within")
BETWEEN = ("nothing", "nothing", "evaluation", "loaded", "copied", "zeroed", "graph dropped")
#: Events right after a step, which may be under way still.
AFTER = ("nothing", "nothing", "model saved", "model loaded", "forked")


class Failure(Exception):
    """Raised where an attack wants it."""


class Model(nn.Module):
    """Layers in any order, some several times, some never; a head that may be the embedding."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(1000))
        self.embed = nn.Embedding(50, 32)
        count = rng.randint(2, 4)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=rng.random() < 0.5) for _ in range(count))
        self.order = [rng.randrange(count) for _ in range(rng.randint(1, 6))]
        self.head = nn.Linear(32, 50, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight
        self.recompute = rng.choice([False, True])
        self.fails: tuple[str, int] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place, index in enumerate(self.order):
            if self.fails == ("forward", place):
                raise Failure
            if self.fails == ("backward", place) and x.requires_grad:
                x.register_hook(_fail)
            x = x + self._call(self.layers[index], torch.tanh(x))
        out: Tensor = self.head(x)
        return out

    def _call(self, layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)


def _fail(_: Tensor) -> None:
    raise Failure


class Run:
    """A model with its optimizers, whose gradients are released if ``release`` says so."""

    def __init__(self, rng: Random, way: str, release: dict[str, Any] | None, offload: str | None) -> None:
        self.inner = Model(rng)
        self.model = _wrapped(self.inner, way, rng)
        self.params = list(self.model.parameters())
        parts = [self.params] if rng.random() < 0.6 else [self.params[::2], self.params[1::2]]
        options = {"lr": 1e-2, "min_quantized_numel": 64, "codec": rng.choice(["log8", "dynamic8", "fp32"])}
        self.optimizers = [shardopt.AdamW8bit(part, offload=offload, **options) for part in parts if part]
        self.release_options = release
        self.releases: list[shardopt.GradientRelease] = []
        self.release()

    def release(self) -> None:
        if self.release_options is not None:
            make = shardopt.release_gradients
            self.releases = [make(self.model, optimizer, **self.release_options) for optimizer in self.optimizers]

    def remove(self, lost: set[int]) -> None:
        """Ends the releases; adds the places of parameters whose gradients were held, and are thrown away."""
        for optimizer, release in zip(self.optimizers, self.releases, strict=False):
            holder = optimizer._internals.held_release
            held = {} if holder is None else holder.host_gradients
            lost.update(index for index, param in enumerate(self.params) if param in held)
            release.remove()
        self.releases.clear()

    def backward(self, batch: int) -> str:
        """Returns what was raised, if anything."""
        generator = torch.Generator().manual_seed(batch)
        tokens = torch.randint(50, (2, 5), generator=generator)
        try:
            self.model(tokens).square().mean().backward()
        except (Failure, RuntimeError) as error:
            return str(error) or "failed"
        return ""

    def each(self, name: str, *args: Any) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, name)(*args)

    def counts(self) -> list[int]:
        """How often each parameter was stepped."""
        self.each("synchronize")
        states = [next((o.state[p] for o in self.optimizers if p in o.state), {}) for p in self.params]
        return [int(state.get("step", 0)) for state in states]

    def everything(self) -> dict[str, Tensor]:
        self.each("synchronize")
        found = {f"param {i}": local(p).detach() for i, p in enumerate(self.params)}
        for i, p in enumerate(self.params):
            for optimizer in self.optimizers:
                state = optimizer.state.get(p, {})
                found.update({f"{key} {i}": local(x) for key, x in state.items() if isinstance(x, Tensor)})
        return found


def _wrapped(model: Model, way: str, rng: Random) -> nn.Module:
    layers, view = rng.random() < 0.5, rng.random() < 0.5
    if way == "ddp":
        return DistributedDataParallel(
            model, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.01
        )
    if way == "fsdp":
        if layers:
            for layer in model.layers:
                fully_shard(layer)
        return fully_shard(model)
    return model


def prepare(base: Path) -> None:
    """Each attack makes all that it needs."""


def attack(seed: int, number: int, base: Path) -> Outcome:
    """A few steps of one random model."""
    return call(lambda: _train(seed, number, base / f"release-{number}"))


def _train(seed: int, number: int, folder: Path) -> Outcome:
    rng = Random(f"releases {seed} {number}")
    way = rng.choice(["plain", "plain", "ddp", "fsdp"])
    offload = rng.choice([None, None, "step"])
    release = {
        "overlap_forward": rng.random() < 0.5,
        "waiting_gradients": rng.choice([1, 4, 100]),
        "micro_batches": rng.choice([1, 1, 2]),
    }
    detail = f"{way}, offload {offload}, {release}"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if way != "plain":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.enter_context(offload_from_cpu())
        stack.enter_context(slow_steps(0.001))
        choices = rng.randrange(1 << 30)
        runs = [Run(Random(choices), way, options, offload) for options in (release, None)]
        done: list[str] = []
        try:
            for step in range(STEPS):
                done += _step(rng, step, way, *runs, folder / str(step))
        except AssertionError as error:
            return fault("other bits", f"{shown(str(error))}, after {done}, {detail}")
        except Exception as error:  # any error is a fault here
            return fault(f"{type(error).__name__}", f"{shown(str(error))}, after {done}, {detail}")
        left = [weakref.ref(x) for x in (runs[0].model, *runs[0].optimizers, *runs[0].params)]
        del runs
        torch.ones(1, requires_grad=True).backward()  # until then torch keeps the graph of a pass that failed
        gc.collect()
        if any(ref() is not None for ref in left):
            return fault("leaked", f"{sum(ref() is not None for ref in left)} of {len(left)}, {done}, {detail}")
    return ok(way)


def _step(rng: Random, step: int, way: str, released: Run, ordinary: Run, folder: Path) -> list[str]:
    """A step of both, and what happened in it; they must be the same afterwards."""
    # After a pass that failed DDP does not go on, and fully_shard adds what it has not reduced to the next gradients:
    # with a release and without, but both must have failed alike.
    excluded = {"plain": (), "fsdp": ("two passes",), "ddp": ("two passes", *(e for e in EVENTS if "fails" in e))}
    event = rng.choice([event for event in EVENTS if event not in excluded[way]])
    between, place = rng.choice(BETWEEN), rng.randrange(len(released.inner.order))
    after = rng.choice(AFTER)
    both = (released, ordinary)
    if not released.releases:
        released.release()
    for run in both:
        _between(between, run, way)
    before, hooks = released.counts(), []
    lost: set[int] = set()
    chosen = rng.randrange(len(released.params))
    if event in ("forward fails", "backward fails"):
        for run in both:
            run.inner.fails = (event.partition(" ")[0], place)
    if event == "removed":
        released.remove(lost)
    if event == "hook fails":
        hooks += [run.params[chosen].register_post_accumulate_grad_hook(_fail) for run in both]
    if event == "removed within":
        hooks.append(released.params[chosen].register_post_accumulate_grad_hook(lambda _: released.remove(lost)))
    micro_batches = released.release_options["micro_batches"] if released.release_options else 1
    raised = ["", ""]
    for micro_batch in range(micro_batches):
        if not raised[0]:
            raised = [run.backward(100 + 10 * step + micro_batch) for run in both]
            for param in [ordinary.params[index] for index in lost]:
                param.grad = None
            lost.clear()
    for hook in hooks:
        hook.remove()
    for run in both:
        run.inner.fails = None
    if event == "two passes" and not raised[0]:
        second = released.backward(200 + step)
        count = micro_batches + 1
        # The thread of the first pass's steps may still be at work: then autograd may be the first to notice.
        refused = f"got gradient {count} since the last" in second or "modified by an inplace operation" in second
        assert refused or before == released.counts(), second
        raised = [second or "discarded"] * 2
    if raised[0]:
        assert event not in ("step", "removed", "removed within"), f"{event} raised {raised[0]}"
        taken = [now - then for now, then in zip(released.counts(), before, strict=True)]
        for param, count in zip(ordinary.params, taken, strict=True):
            if not count:
                param.grad = None
        ordinary.each("step")
    else:
        for run in both:
            run.each("step")
        _after(after, released, ordinary, way, folder)
    for run in both:
        run.each("zero_grad")
        if raised[0] and way == "fsdp":
            run.model.reset_iter_state()  # type: ignore[operator]
    assert_same(released.everything(), ordinary.everything())
    return [f"{event} at {place}, {between}, {after}"]


def _after(event: str, released: Run, ordinary: Run, way: str, folder: Path) -> None:
    """Both have taken the same step: a checkpoint of one model must change nothing in the other."""
    if event.startswith("model"):
        source, target = (released, ordinary) if event == "model saved" else (ordinary, released)
        shardopt.checkpoint.save(folder, source.model)
        shardopt.checkpoint.load(folder, target.model)
    elif event == "forked" and way == "plain":
        released.each("synchronize")
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            try:
                failed = released.backward(7)
                released.each("step")
                released.each("synchronize")
                os._exit(bool(failed))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a forked child's step hangs or fails"


def _between(event: str, run: Run, way: str) -> None:
    if event == "evaluation":
        with torch.no_grad():
            run.model(torch.arange(10))
    elif event == "loaded":
        for optimizer in run.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif event == "copied" and way == "plain":
        run.each("synchronize")
        copy.deepcopy(run.model)(torch.arange(10)).sum().backward()
    elif event == "zeroed":
        run.each("zero_grad", False)
    elif event == "graph dropped" and way == "plain":
        run.model(torch.arange(10))
