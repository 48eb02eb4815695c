"""State in the host's memory: the bits of a step without offload, in a buffer of fixed size, within the budget."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from helpers import CODEC_NAMES, RULES, everything, through_a_file
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import HostTransfers, LateTransfers, late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.state import residency
from shardopt.state.options import bytes_of
from slow_cases import slow

BF16 = torch.bfloat16
CHUNK = 16384
OFFLOADS = ("state", "step")


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu(CHUNK):
        yield


class Shapes(nn.Module):
    """Rows longer than a chunk, many rows, rows with short last blocks, a long vector, small ones, and nothing."""

    SHAPES = ((3, 9001), (200, 300), (70, 33), (20000,), (7,), (), (0, 5), (40, 3, 3, 7))

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in self.SHAPES]
        self.weights = nn.ParameterList([nn.Parameter(x) for x in made])


def make(offload: str | None, rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = Shapes(dtype)
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.03, "lr": 2e-3, "block_size": 32}]
    return model, RULES[rule].make(groups, offload=offload, **{"min_quantized_numel": 64, **options})


def set_gradients(model: nn.Module, step: int, leave_out: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(model.parameters()):
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype) * 0.1
        param.grad = None if place == leave_out else gradient


def run(model: nn.Module, optimizer: ShardedOptimizer, first: int = 0, steps: int = 4) -> None:
    """Steps of which one leaves out a parameter, with a learning rate that changes."""
    for step in range(first, first + steps):
        set_gradients(model, step, leave_out=1 if step == 1 else None)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()


def assert_equal(got: tuple[nn.Module, ShardedOptimizer], expected: tuple[nn.Module, ShardedOptimizer]) -> None:
    got[1].synchronize()
    assert_same(everything(got[1]), everything(expected[1]))


SAME_BITS: list[tuple[str, str, dict[str, Any]]] = [
    *((offload, "adamw", {"codec": codec}) for offload, codec in product(OFFLOADS, CODEC_NAMES)),
    ("state", "lion", {}),
    ("step", "sgd", {"codec": "fp32"}),
    ("step", "ademamix", {}),
    ("state", "amsgrad", {"codec": "bf16"}),
    ("state", "lamb", {}),
    ("step", "repaid_adamw", {"codec": "companded8"}),
    ("state", "adamw", {"dtype": BF16, "master_weight_bits": 24}),
    ("step", "adamw", {"dtype": BF16, "master_weight_bits": 32}),
    *((offload, "adamw", {"dtype": BF16, "stochastic_rounding": True}) for offload in OFFLOADS),
]
ALL = [(offload, rule, {"codec": codec}) for offload, rule, codec in product(OFFLOADS, RULES, CODEC_NAMES)]


@pytest.mark.parametrize(("offload", "rule", "options"), [*SAME_BITS, *slow(ALL, besides=SAME_BITS)], ids=str)
def test_same_bits(offload: str, rule: str, options: dict[str, Any]) -> None:
    runs = [make(how, rule, **options) for how in (None, offload)]
    for pair in runs:
        run(*pair)
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize(
    ("offload", "codec", "budget"), [("state", "log8", 0), ("state", "bf16", 400_000), ("step", "log8", 400_000)]
)
def test_sums_over_all_parameters(codec: str, offload: str, budget: int) -> None:
    """Some of them may be stepped elsewhere than others."""
    runs = [make(how, "prodigy", codec=codec, device_state_budget=budget) for how in (None, offload)]
    for model, optimizer in runs:
        for step in range(4):
            set_gradients(model, step, leave_out=1 if step == 1 else None)
            for group in optimizer.param_groups:
                group["lr"] = 0.9**step
            optimizer.step()
    assert_equal(runs[1], runs[0])
    (d,) = {group["d"] for _, optimizer in runs for group in optimizer.param_groups}
    assert d > RULES["prodigy"].hyper["d0"]


@pytest.mark.parametrize(("offload", "chunk"), [("state", 16384), ("state", 1 << 20), ("step", 40000)])
def test_any_chunk_and_late_copies(offload: str, chunk: int) -> None:
    """Copies that come at the last moment that is allowed, through slots that are never larger than a chunk."""
    expected = make(None)
    run(*expected)
    with offload_from_cpu(chunk, late_transfers(offload)):
        got = make(offload)
        run(*got)
        assert_equal(got, expected)
        transfers = LateTransfers.latest
        assert transfers.nbytes <= 3 * chunk
        if chunk < 1 << 20:
            assert transfers.most_in_flight == 3, "copies in, kernels and copies out have a slot each"


@pytest.mark.parametrize(
    ("offload", "dtype"),
    [("state", torch.float32), ("step", torch.float16)],
)
def test_every_byte_once(offload: str, dtype: torch.dtype) -> None:
    """A step copies the state in and out; or parameters and gradients in, and parameters out."""
    with offload_from_cpu(CHUNK, late_transfers(offload)):
        model, optimizer = make(offload, dtype=dtype)
        run(model, optimizer, steps=1)
        transfers = LateTransfers.latest
        numel = sum(param.numel() for param in model.parameters())
        entries = [
            value
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step" and value.numel()
        ]
        state = sum(value.nbytes for value in entries)
        parameters = numel * dtype.itemsize  # and gradients, of the same dtype
        assert transfers.bytes_in == (state if offload == "state" else 2 * parameters)
        assert transfers.bytes_out == (state if offload == "state" else parameters)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_budget(offload: str) -> None:
    """State that fits stays, in order; all and nothing are the ends of it; the bits are the same."""
    expected = make(None)
    run(*expected)
    sizes = [
        sum(value.nbytes for key, value in expected[1].state[param].items() if key != "step")
        for param in expected[0].parameters()
    ]
    for budget in (0, sizes[0], sizes[0] + sizes[2], sum(sizes) - 1, sum(sizes), "1GiB"):
        got = make(offload, device_state_budget=budget)
        run(*got)
        assert_equal(got, expected)
        room = bytes_of(budget)
        for param, size in zip(got[0].parameters(), sizes, strict=True):
            stays = size <= room
            room -= size if stays else 0
            assert got[1]._internals.residency.of(param).offload == (None if stays else offload), (budget, size)


def test_loading_keeps_the_budget() -> None:
    saved, own = (make("state", device_state_budget=size) for size in (0, "1GiB"))
    run(*saved, steps=1)
    own[1].load_state_dict(saved[1].state_dict())
    assert {group["device_state_budget"] for group in own[1].param_groups} == {"1GiB"}
    own[1].add_param_group({"params": [nn.Parameter(torch.zeros(5))]})


@pytest.mark.parametrize("offload", OFFLOADS)
def test_state_dict_is_the_same(offload: str) -> None:
    """And loads with and without offload, so that a run turns it on or off."""
    plain, offloaded = make(None), make(offload)
    for pair in (plain, offloaded):
        run(*pair, steps=2)
    saved = [through_a_file(optimizer.state_dict()) for _, optimizer in (plain, offloaded)]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    for index, state in saved[0]["state"].items():
        assert_same(saved[1]["state"][index], state)
    weights = copy.deepcopy(plain[0].state_dict())
    run(*plain, first=2, steps=2)
    for now, state_dict in ((offload, saved[0]), (None, saved[1])):
        model, optimizer = make(now)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state_dict)
        assert all(group["offload"] == now for group in optimizer.param_groups)
        run(model, optimizer, first=2, steps=2)
        assert_equal((model, optimizer), plain)


@pytest.mark.parametrize("reset", ["all", "one entry"])
def test_state_that_is_replaced_by_hand(reset: str) -> None:
    """While copies of the old one are still under way."""
    with offload_from_cpu(CHUNK, late_transfers("state")):
        runs = [make(how) for how in (None, "state")]
        for model, optimizer in runs:
            run(model, optimizer, steps=2)
            if reset == "all":
                optimizer.state = defaultdict(dict)
            else:
                state = optimizer.state[model.weights[1]]
                state["exp_avg_codes"] = torch.full(state["exp_avg_codes"].shape, 77, dtype=torch.uint8)
            run(model, optimizer, first=2, steps=2)
        assert_equal(runs[1], runs[0])


@pytest.mark.parametrize(("before", "after"), [("step", None), ("state", "step")])
def test_portable_checkpoint(tmp_path: Path, before: str | None, after: str | None) -> None:
    first = make(before)
    run(*first, steps=2)
    shardopt.checkpoint.save(tmp_path, *first)
    second = make(after)
    run(*second, first=7, steps=1)  # it has state elsewhere already
    shardopt.checkpoint.load(tmp_path, *second)
    assert all(group["offload"] == after for group in second[1].param_groups)
    assert_equal(second, first)
    for pair in (first, second):
        run(*pair, first=2, steps=2)
    assert_equal(second, first)
    kinds = {second[1]._internals.residency.of(param).offload for param in second[0].parameters() if param.numel()}
    assert kinds == {after}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_full_precision_parameters(offload: str) -> None:
    """The master bits are read and written where they are, before and after the first step."""
    with offload_from_cpu(CHUNK, late_transfers(offload)):
        plain, offloaded = (make(how, dtype=BF16, master_weight_bits=24) for how in (None, offload))
        for model, optimizer in (plain, offloaded):
            weights = optimizer.full_precision_parameters()
            optimizer.load_full_precision_parameters({param: 1.001 * x for param, x in weights.items()})
            run(model, optimizer, steps=2)
        pairs = zip(plain[0].parameters(), offloaded[0].parameters(), strict=True)
        found = [optimizer.full_precision_parameters() for _, optimizer in (plain, offloaded)]
        for a, b in pairs:
            assert torch.equal(found[0][a], found[1][b])
        assert_equal(offloaded, plain)


def test_state_lies_in_one_piece_of_memory() -> None:
    """Small parameters next to each other are one copy."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(20)])
    optimizer = shardopt.AdamW8bit(model, offload="state", min_quantized_numel=0)
    counted: list[int] = []

    class Counting(HostTransfers):
        def fetch(self, slot: Any, copies: Any, after: object) -> None:
            counted.append(len(copies.home))
            super().fetch(slot, copies, after)

    with offload_from_cpu(1 << 20, Counting):
        for param in model:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert counted == [1]


# Around a step -------------------------------------------------------------------------------------


def test_state_that_cannot_be_stepped_is_told_in_the_backward_pass() -> None:
    model = make_net()
    optimizer = RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload="step")
    shardopt.release_gradients(model, optimizer)
    loss_of(model, make_batch(0)).backward()
    optimizer.step()
    optimizer.state[model.up.weight]["exp_avg_codes"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="got state exp_avg_codes"):
        loss_of(model, make_batch(0)).backward()


@pytest.mark.parametrize("offload", OFFLOADS)
def test_skipped_elements_are_counted(offload: str) -> None:
    runs = [make(how) for how in (None, offload)]
    for model, optimizer in runs:
        for step in range(2):
            set_gradients(model, step)
            model.weights[0].grad[1, 5000] = float("nan")
            with pytest.warns(RuntimeWarning, match="skipped 1 gradient elements") if step else nullcontext():
                optimizer.step()
        assert optimizer.nonfinite_count == 2
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize("offload", OFFLOADS)
def test_nonfinite_raises_and_changes_nothing(offload: str) -> None:
    model, optimizer = make(offload, nonfinite="raise")
    run(model, optimizer, steps=1)
    optimizer.synchronize()
    before = copy.deepcopy(everything(optimizer))
    set_gradients(model, 1)
    model.weights[0].grad[1, 5000] = float("inf")
    with pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.synchronize()
    assert_same(everything(optimizer), before)


def test_state_that_was_loaded_later_moves_in() -> None:
    """And parameters that were added later get places of their own."""
    runs = [make(how) for how in (None, "state")]
    added = [nn.Parameter(torch.ones(64, 200)) for _ in runs]
    for pair, param in zip(runs, added, strict=True):
        run(*pair, steps=2)
        pair[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
        pair[1].add_param_group({"params": [param]})
        param.grad = torch.full_like(param, 0.5)
        run(*pair, first=2, steps=2)
    assert_equal(runs[1], runs[0])
    assert torch.equal(added[0], added[1])
    assert runs[1][1]._internals.residency.of(added[1]).offload == "state"


def test_memory_report() -> None:
    model, optimizer = make("state")
    run(model, optimizer, steps=1)
    report, plain = shardopt.memory_report(optimizer), make(None)
    run(*plain, steps=1)
    expected = shardopt.memory_report(plain[1])
    assert report.host.scales == expected.host.scales
    assert report.host.offload_buffers == 3 * CHUNK
    aligning = report.host.state - expected.host.state
    assert 0 <= aligning < 64 * sum(len(state) for state in optimizer.state.values())


def test_on_the_cpu_there_is_nothing_to_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "FROM_CPU", None)
    model, optimizer = make("state")
    run(model, optimizer, steps=1)
    assert all(optimizer._internals.residency.of(param).offload is None for param in model.parameters())
    assert optimizer._internals.residency.buffer_bytes == {}
