"""Steps from cached tables, beside the same steps from tables that are made anew each time.

Before each step the parameters, state or options of a random optimizer change, and gradients are of any kind. All bits
must be the same at all times. Memory that was cut or freed must be refused, with nothing changed.
"""

from __future__ import annotations

import copy
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from attack.forked import Outcome, call, fault, ok, shown
from helpers import CODEC_NAMES, RULES, everything, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.step.stepper import Stepper
from step_changes import CHANGES, cut_in_place, resized
from step_problem import SHAPES, kept, params_of, put, put_data
from wrappers import Scaled, Wrapped, zeros

STEPS = 40

#: By kind, the gradient that is given in the place of a plain one, and the plain one of the same numbers.
GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor | None], Callable[[Tensor], Tensor | None]]] = {
    "plain": (torch.clone, torch.clone),
    "strided": (lambda x: torch.stack([x, x], -1)[..., 0], torch.clone),
    "wide": (torch.Tensor.float, torch.Tensor.float),
    "zero tensor": (zeros, torch.zeros_like),
    "wrapper": (Wrapped, torch.clone),
    "scaled wrapper": (lambda x: Scaled(x * 2), torch.clone),
    "none": (lambda x: None, lambda x: None),
}
KINDS = ("plain", "plain", *GRADIENTS, "in place")

#: Changes of :data:`CHANGES` that an optimizer of any rule can have, again and again.
OF_ANY_RULE = ("parameters reversed", "parameters swapped", "state replaced", "state cleared")


def replace_elements(optimizer: ShardedOptimizer, index: int, key: str) -> None:
    """Gives a parameter, or the tensor inside it, other elements at another address."""
    param = params_of(optimizer)[index]
    kept.append(_memory(param).detach())
    if isinstance(param, Wrapped):
        param._tensor = param._tensor / 2
    else:
        param.grad = None
        param.data = param.data / 2


def replace_parameter(optimizer: ShardedOptimizer, index: int, key: str) -> None:
    """Puts another parameter of the same elements, without state, into the group, as when embeddings are resized."""
    old = params_of(optimizer)[index]
    elements = _memory(old).detach().clone()
    new = Parameter(Wrapped(elements) if isinstance(old, Wrapped) else elements)
    for group in optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    optimizer.state.pop(old, None)


def lower_lr(optimizer: ShardedOptimizer, index: int, key: str) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def load(optimizer: ShardedOptimizer, index: int, key: str) -> None:
    kept.append(dict(optimizer.state))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


#: Changes of one parameter, by its index, or of one state entry, by its name.
OWN_CHANGES: dict[str, Callable[[ShardedOptimizer, int, str], object]] = {
    "elements": replace_elements,
    "parameter": replace_parameter,
    "lr": lower_lr,
    "loaded": load,
    "state popped": lambda optimizer, index, key: kept.append(optimizer.state.pop(params_of(optimizer)[index], None)),
    "entry replaced": lambda optimizer, index, key: put(optimizer, index, key, torch.clone),
    "data of entry": lambda optimizer, index, key: put_data(optimizer, index, key, torch.clone),
}
REFUSED = ("parameter cut", "gradient cut", "entry cut", "entry without memory")
#: Where the step is taken that uses cached tables.
PLACES = ("here", "here", "here", "here", "inference mode", "thread")
EVENTS = (*["nothing"] * 25, *2 * list(OWN_CHANGES), *2 * REFUSED, "entry moved", *OF_ANY_RULE)


def _memory(param: Tensor) -> Tensor:
    tensor: Tensor = getattr(param, "_tensor", param)
    return tensor


class Run:
    """Two optimizers that are alike, of which one makes its tables anew in each step."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        dtype = rng.choice([torch.float32, torch.bfloat16])
        options = {"codec": rng.choice(CODEC_NAMES), "min_quantized_numel": 0}
        if dtype == torch.bfloat16:
            options["master_weight_bits"] = rng.choice([None, 24, 32])
        rule, wrapped = rng.choice(list(RULES)), [rng.random() < 0.4 for _ in SHAPES]
        self.name = f"{rule}, {dtype}, {options}, wrapped {wrapped}"
        self.cached, self.anew = self.both = [_make(rule, dtype, wrapped, options) for _ in range(2)]
        self.buffers = {param: torch.empty_like(_memory(param)) for param in params_of(self.cached)}
        self.from_cache = 0
        self.event = ""

    def step(self) -> None:
        """Takes a step of each, after a change of both or a refusal by one."""
        event, index = self.rng.choice(EVENTS), self.rng.randrange(len(SHAPES))
        entries = self.cached.state.get(params_of(self.cached)[index], {})
        keys = [key for key, value in entries.items() if value.numel()]
        key = self.rng.choice(keys) if keys else ""
        if "entry" in event and not key:
            event = "nothing"
        for optimizer in self.both:
            if event in OWN_CHANGES:
                OWN_CHANGES[event](optimizer, index, key)
            elif event in OF_ANY_RULE:
                CHANGES[event](optimizer)
        if event == "entry moved":
            with resized(entries[key], 0):
                pass
        kinds, place = self._set_gradients(), self.rng.choice(PLACES)
        self.event = f"{event} of {index} {key}, {kinds}, {place}"
        if event in REFUSED and kinds[index] != "none":
            self._refuse(event, index, key, kinds[index])
        with patch.object(Stepper, "_make_tables", autospec=True, side_effect=Stepper._make_tables) as made:
            self._step_in(place)
            self.from_cache += not made.called
        self.anew._internals.invalidate_steps()
        self.anew.step()
        assert_same(everything(self.cached), everything(self.anew))

    def _step_in(self, place: str) -> None:
        if place == "thread":
            thread = threading.Thread(target=self.cached.step)
            thread.start()
            thread.join()
        else:
            with torch.inference_mode(place == "inference mode"):
                self.cached.step()

    def _set_gradients(self) -> list[str]:
        kinds = []
        for param, plain in zip(*map(params_of, self.both), strict=True):
            kinds.append(self.rng.choice(KINDS))
            numbers = values(tuple(param.shape), self.rng.randrange(4000), param.dtype)
            buffer = self.buffers.get(param, torch.empty_like(numbers)).copy_(numbers)
            given, expected = GRADIENTS.get(kinds[-1], (lambda x, buffer=buffer: buffer, torch.clone))
            for one, gradient in ((param, given(numbers)), (plain, expected(numbers))):
                one.grad = None
                if gradient is not None:
                    with_gradient(one, gradient)
        return kinds

    def _refuse(self, event: str, index: int, key: str, kind: str) -> None:
        param = params_of(self.cached)[index]
        entries, words = self.cached.state[param], "whose storage has"
        without: AbstractContextManager[object]
        if event == "entry without memory":
            words, without = "memory", patch.dict(entries, {key: zeros(entries[key])})
        elif event == "gradient cut" and kind not in ("plain", "wide", "in place"):
            return
        else:
            tensors = {"parameter cut": _memory(param), "gradient cut": param.grad, "entry cut": entries.get(key)}
            without = self._cut(tensors[event])
        before = everything(self.cached)
        with without, pytest.raises(RuntimeError, match=words):
            self.cached.step()
        after = everything(self.cached)  # a parameter without state may have got some, as new as its first step's
        assert_same({name: after[name] for name in before}, before)

    def _cut(self, tensor: Tensor | None) -> AbstractContextManager[None]:
        assert tensor is not None
        left = self.rng.choice((0, self.rng.randrange(tensor.untyped_storage().nbytes())))
        return self.rng.choice((cut_in_place, resized))(tensor, left)


def _make(rule: str, dtype: torch.dtype, wrapped: list[bool], options: dict[str, object]) -> ShardedOptimizer:
    tensors = [values(shape, i, dtype) for i, shape in enumerate(SHAPES)]
    params = [Parameter(Wrapped(x) if wrap else x) for x, wrap in zip(tensors, wrapped, strict=True)]
    return RULES[rule].make([{"params": params[:3]}, {"params": params[3:]}], **options)


def attacks(seed: int, first: int, count: int, folder: Path) -> Iterator[Outcome]:
    """The outcome of each attack; prints how many of all steps were taken from cached tables."""
    cached = 0
    for number in range(first, first + count):
        outcome = call(lambda number=number: _attack(seed, number))  # type: ignore[misc]
        if not outcome.fault:
            cached += json.loads(outcome.detail)
        yield outcome._replace(attack=f"cached_steps --seed {seed} --first {number} --count 1: {outcome.attack}")
    print(f"{cached} of {count * STEPS} steps were taken from cached tables", flush=True)


def _attack(seed: int, number: int) -> Outcome:
    """Steps of one random optimizer."""
    warnings.simplefilter("ignore")
    run = Run(Random(f"cached steps {seed} {number}"))
    for t in range(STEPS):
        try:
            run.step()
        except (Exception, pytest.fail.Exception) as error:
            return fault(type(error).__name__, f"step {t}: {shown(str(error))}, {run.event}; {run.name}")
    return ok("right bits", json.dumps(run.from_cache))
