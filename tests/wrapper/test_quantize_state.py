"""quantize_state: steps are the bare optimizer's, what is quantized and refused, torch's protocol, and state dicts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

import shardopt
from helpers import through_a_file
from ranks.models import WAYS, make_net
from shardopt import quantize_state
from shardopt.wrapper.entries import WEIGHT_COPIES
from shardopt.wrapper.known import BY_PARAMETER as LISTED_BY_PARAMETER
from shardopt.wrapper.known import ELEMENTWISE as LISTED_ELEMENTWISE
from shardopt.wrapper.known import full_name
from wrapped import (
    BY_PARAMETER,
    ELEMENTWISE,
    SEPARABLE,
    TOGETHER,
    AdamW,
    Custom,
    bits,
    of,
    parameters,
    quietly,
    same,
    set_gradients,
    train_mode,
    trained,
    trained_adamw,
)

NEVER = 2**40


def skip_unless_installed(name: str) -> None:
    """Skips the test of an optimizer that is not there."""
    package, optimizer = name.split()[:2]
    if package != "torch":
        pytest.importorskip({"timm": "timm.optim"}.get(package, package))
    elif not hasattr(torch.optim, optimizer):
        pytest.skip(f"torch.optim.{optimizer} comes with a newer PyTorch")


def equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(equal, x, y))
    return bool(x == y)


def codes_of(optimizer: Any) -> list[Tensor]:
    """Copies of all codes."""
    return [x.clone() for x in bits([], optimizer) if x.dtype == torch.uint8]


# Steps.


@pytest.mark.parametrize("name", SEPARABLE)
def test_steps_are_those_of_the_bare_optimizer(name: str) -> None:
    """Bit for bit, where no state is quantized; copies of weights are known."""
    skip_unless_installed(name)
    bare_params, params = parameters(), parameters()
    bare = SEPARABLE[name](bare_params)
    optimizer = quantize_state(SEPARABLE[name](params), min_quantized_numel=NEVER)
    old = parameters()
    for each, own in ((bare, bare_params), (optimizer, params)):
        train_mode(each)
        torch.manual_seed(0)
        trained(each, own, range(1))
        for param, first in zip(own, old, strict=True):
            state = each.state.get(param, {})
            copies = {key for key, x in state.items() if isinstance(x, Tensor) and x.shape == param.shape}
            copies = {key for key in copies if torch.equal(state[key], first) or torch.equal(state[key], param)}
            assert copies <= WEIGHT_COPIES
        trained(each, own, range(1, 7))
    assert equal(params, bare_params)
    assert equal(optimizer.state_dict(dequantize=True), bare.state_dict())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_of_parts_are_parts_of_steps(name: str) -> None:
    """Rows of a parameter step as parameters of their own do, which stepping local shards relies on."""
    skip_unless_installed(name)
    whole = parameters()
    parts = [Parameter(x.detach().clone()) for p in whole for x in p.detach().chunk(3)]
    optimizers = [ELEMENTWISE[name](own) for own in (whole, parts)]
    for optimizer in optimizers:
        train_mode(optimizer)
    for step in range(7):
        set_gradients(whole, step)
        gradients = [g for p in whole for g in ([None] * 3 if p.grad is None else p.grad.chunk(3))]
        for part, gradient in zip(parts, gradients, strict=False):
            part.grad = None if gradient is None else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*(torch.cat([p.detach().reshape(-1) for p in own]) for own in (parts, whole)))


def test_the_tables_have_what_is_tested() -> None:
    """Of packages that are installed: each class in the tables is tested, and each tested one is in them."""
    for makes, listed in ((ELEMENTWISE, LISTED_ELEMENTWISE), (BY_PARAMETER, LISTED_BY_PARAMETER)):
        installed = {package for package in ("torch", "pytorch_optimizer", "schedulefree") if find_spec(package)}
        made = [makes[name](parameters()) for name in makes if name.split()[0] in installed]
        names = {full_name(optimizer) for optimizer in made}
        own = {name for name in listed if name.split(".")[0] in installed}
        assert names <= own
        assert {name.split(".")[-1] for name in own} == {name.split(".")[-1] for name in names}


def test_counters_advance_once_per_step() -> None:
    """In the optimizer and its groups, which stay the same objects; a step that fails leaves the state."""

    class Counts(torch.optim.AdamW):
        number = 0
        fails = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.number += 1
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                group["tensor"] += 1
                group.setdefault("history", []).append(group["k"])
            super().step()
            if self.fails:
                raise RuntimeError("no more")

    params, counter = parameters(), torch.zeros(())
    inner = Counts([{"params": params[:2], "tensor": counter}, {"params": params[2:], "tensor": torch.ones(())}])
    groups = [(id(group), id(group["params"])) for group in inner.param_groups]
    optimizer = trained(quietly(inner), params, range(3))
    assert inner.number == 3
    assert [(group["k"], float(group["tensor"])) for group in inner.param_groups] == [(3, 3.0), (3, 4.0)]
    assert inner.param_groups[0]["history"] == [1, 2, 3]
    assert inner.param_groups[0]["tensor"] is counter
    before = codes_of(optimizer)
    inner.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        trained(optimizer, params, range(1))
    assert same(codes_of(optimizer), before)
    inner.fails = False
    trained(optimizer, params, range(1))
    assert [(id(group), id(group["params"])) for group in optimizer.param_groups] == groups


def test_strided_parameters() -> None:
    """A parameter in another order of memory has the bits of a contiguous one."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        param = Parameter(torch.randn(16, 8, 6, 6).to(memory_format=memory_format))
        optimizer = quantize_state(AdamW([param]))
        for _ in range(3):
            param.grad = torch.randn(16, 8, 6, 6).to(memory_format=memory_format)
            optimizer.step()
        results.append(bits([param], optimizer))
    assert same(*results)


def test_memory() -> None:
    """State in full exists for one parameter at a time."""
    params, optimizer = trained_adamw()
    report = shardopt.memory_report(optimizer)
    assert report.host.scales > 0
    assert report.host.state < 2.2 * sum(param.numel() for param in params)


# Entries.


def test_state_from_before() -> None:
    """State from before the optimizer was wrapped, or that it loads bare, is quantized like state that steps make."""
    params, others = parameters(), parameters()
    bare, again = trained(AdamW(others), others), quantize_state(AdamW(params))
    again.load_state_dict(bare.state_dict())
    before = quantize_state(bare)
    assert same(bits([], before), bits([], again))
    optimizer = trained_adamw()[1]
    assert [x.dtype for x in bits([], before)] == [x.dtype for x in bits([], optimizer)]


def test_what_is_kept() -> None:
    params = parameters()
    optimizer = trained(quietly(Custom(params), unsigned=("squares",), keep=("start",)), params)
    state = optimizer.state[params[0]]
    assert {"start", "count", "rows", "squares_codes", "moment_codes"} <= set(state)
    assert state["squares_scales"].shape == (64, 1, 2)  # unsigned
    assert state["moment_scales"].shape == (64, 1)
    assert torch.equal(state["start"], parameters()[0])
    for name, kept in (("torch ASGD", {"ax"}), ("torch Rprop", {"step_size"})):
        assert kept <= set(trained(quantize_state(ELEMENTWISE[name](params)), params).state[params[0]])
    centered = trained(quantize_state(ELEMENTWISE["torch RMSprop centered momentum"](params)), params)
    assert {"grad_avg", "square_avg", "momentum_buffer_codes"} <= set(centered.state[params[0]])


def test_negative_values_in_an_unsigned_entry() -> None:
    params = parameters()
    optimizer = quietly(Custom(params, square=-1.0), unsigned=("squares",))
    set_gradients(params, 0)
    with pytest.raises(ValueError, match=r"squares: got -\d.* expected numbers >= 0"):
        optimizer.step()
    assert params[0] not in optimizer.state


def test_loaded_floats_of_another_shape() -> None:
    params, others = parameters(), parameters()
    saved = trained(AdamW(params), params).state_dict()
    optimizer = quantize_state(AdamW(others))
    optimizer.load_state_dict(saved)
    before = bits([], optimizer)
    saved["state"][0]["exp_avg"] = torch.zeros(128, 64)
    with pytest.raises(ValueError, match=r"got exp_avg as Tensor \(128, 64\), expected Tensor \(64, 128\); load"):
        optimizer.load_state_dict(saved)
    assert same(bits([], optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_double_precision(dtype: torch.dtype) -> None:
    """A float64 entry of a float64 parameter is quantized; beside a float32 parameter it is kept."""
    params = [Parameter(x.to(dtype)) for x in parameters()]
    trained_before = trained(Custom(params), params)
    for state in trained_before.state.values():
        state["moment"] = state["moment"].double()
    optimizer = quietly(trained_before)
    assert ("moment" in optimizer.state[params[0]]) == (dtype == torch.float32)
    assert optimizer.state_dict(dequantize=True)["state"][0]["moment"].dtype == torch.float64


# Refusals.


def around_another(params: list[Parameter]) -> Optimizer:
    outer = Custom(params)
    outer.base = AdamW(params)  # type: ignore[attr-defined]
    return outer


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (of("torch.optim", "LBFGS"), {}, TypeError, "closure several times"),
        (of("torch.optim", "SparseAdam"), {}, TypeError, "sparse"),
        (of("torch.optim", "AdamW", differentiable=True), {}, ValueError, "differentiable"),
        (of("shardopt", "AdamW8bit"), {}, TypeError, "quantized already"),
        (lambda params: quantize_state(AdamW(params)), {}, TypeError, "quantized already"),
        (lambda params: params, {}, TypeError, "torch.optim.Optimizer"),
        (around_another, {}, TypeError, "put Custom around the result"),
        (AdamW, {"codec": "fp32"}, ValueError, "codec: got 'fp32'"),
        (AdamW, {"codec": "log7"}, ValueError, "codec: got 'log7'"),
        (AdamW, {"block_size": 100}, ValueError, "block_size"),
        (AdamW, {"min_quantized_numel": -1}, ValueError, "min_quantized_numel"),
        (AdamW, {"keep": "exp_avg"}, TypeError, "keep: got 'exp_avg'"),
        (AdamW, {"unsigned": "exp_avg"}, TypeError, "unsigned: got 'exp_avg'"),
    ],
)
def test_refused(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_state(make(parameters()), **options)


@pytest.mark.parametrize("name", TOGETHER)
def test_optimizers_of_all_parameters_together_are_refused(name: str) -> None:
    skip_unless_installed(name)
    with pytest.raises(TypeError, match="looks at all parameters together"):
        quantize_state(TOGETHER[name](parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "make", "message"),
    [
        ("fsdp", torch.optim.Adafactor, "depends on all of the parameter"),
        ("fsdp columns", torch.optim.AdamW, "columns that end within blocks of 128"),
        ("fsdp1", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
        ("fsdp1 flat", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
    ],
)
def test_shards_that_are_refused(way: str, make: Any, message: str) -> None:
    sharded = WAYS[way](make_net())
    with pytest.raises(RuntimeError, match=message):
        quantize_state(make(list(sharded.parameters())), min_quantized_numel=64)
    added = quantize_state(make([nn.Parameter(torch.zeros(64, 128))]), min_quantized_numel=64)
    with pytest.raises(RuntimeError, match=message):
        added.add_param_group({"params": list(sharded.parameters())})
    assert len(added.param_groups) == 1


def test_untested_optimizers_warn_once() -> None:
    params = parameters()
    with pytest.warns(UserWarning, match=r"Custom, untested .* copies of weights in keep=") as caught:
        trained(quantize_state(Custom(params)), params)
    assert [each.filename for each in caught] == [__file__]


# torch's protocol.


def test_hooks_run_once() -> None:
    params, seen = parameters(), []
    optimizer = quantize_state(AdamW(params))
    optimizer.register_step_pre_hook(lambda o, *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append("post"))
    trained(optimizer, params, range(2))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(o))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(d["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [*["pre", "post"] * 2, optimizer, 1, "loaded"]


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch AdamW fused"])
def test_grad_scaler(name: str) -> None:
    """Gradients are unscaled once, and a step with an infinite one is left out."""
    params, scaled = parameters(), parameters()
    optimizer, again = (quantize_state(ELEMENTWISE[name](own)) for own in (params, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    trained(optimizer, params, range(1))
    for step, last in ((0, 8.0), (1, torch.inf)):
        set_gradients(scaled, step)
        for param in scaled:
            assert param.grad is not None
            param.grad *= last
        scaler.step(again)
        scaler.update()
        assert same(bits(scaled, again), bits(params, optimizer))


def test_closure_and_param_groups() -> None:
    params, calls = parameters(), []
    inner = AdamW(params[:2])
    optimizer = quantize_state(inner)
    optimizer.add_param_group({"params": params[2:], "lr": 0.5})

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_gradients(params, 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [True]
    assert optimizer.param_groups is inner.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    assert set(optimizer.state) == set(params)
    optimizer.zero_grad()
    before = bits(params, optimizer)
    optimizer.step()  # without gradients
    assert same(bits(params, optimizer), before)


@pytest.mark.parametrize("options", [{"differentiable": True}, {"max_grad_norm": 1.0}])
def test_added_and_loaded_groups_are_checked(options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params[:2])), params)
    before = [x.clone() for x in bits(params, optimizer)]
    (error,) = options
    with pytest.raises(ValueError, match=error):
        optimizer.add_param_group({"params": params[2:], **options})
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=error):
        optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], **options}]})
    assert len(optimizer.param_groups) == 1
    assert same(bits(params, optimizer), before)


def test_methods_of_the_optimizer_inside() -> None:
    """The result has them, too; a step gives each parameter its name."""

    class Named(Optimizer):
        def train(self) -> str:
            return "training"

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.extend(zip(self.param_groups[0]["param_names"], self.param_groups[0]["params"], strict=True))

    seen: list[Any] = []
    model = nn.Linear(128, 64)
    model(torch.ones(2, 128)).sum().backward()
    optimizer = quietly(Named(model.named_parameters(), {}))
    assert optimizer.train() == "training"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        optimizer.nothing()
    optimizer.step()
    assert [(name, id(param)) for name, param in seen] == [(n, id(p)) for n, p in model.named_parameters()]


# State dicts.


def _loaded(given: tuple[list[Parameter], Any]) -> tuple[list[Parameter], Any]:
    """Another optimizer with this one's state dict, by way of a file and of floats."""
    params, optimizer = given
    others = copy.deepcopy(params)
    again = quantize_state(AdamW(others))
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(bits([], again), bits([], optimizer))
    again.load_state_dict(optimizer.state_dict(dequantize=True))
    return others, again


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), _loaded])
def test_copies_and_round_trips(duplicate: Any) -> None:
    params, optimizer = trained_adamw()
    others, again = duplicate((params, optimizer))
    for run, own_params in ((optimizer, params), (again, others)):
        trained(run, own_params, range(4, 7))
    assert same(bits(others, again), bits(params, optimizer))
    assert again.state is not optimizer.state


@pytest.mark.parametrize(
    ("saved_with", "options", "message"),
    [
        ({}, {"codec": "dynamic8"}, "saved with codec="),
        ({}, {"block_size": 64}, "saved with block_size="),
        ({"unsigned": ["squares"]}, {}, r"saved with unsigned=\['squares'\], expected \[\]; pass .* the options"),
        ({}, {"unsigned": ["moment"]}, r"saved with unsigned=\[\], expected \['moment'\]"),
    ],
)
def test_other_options(saved_with: dict[str, Any], options: dict[str, Any], message: str) -> None:
    """Such signs are refused: with most codecs, signed and unsigned codes differ in values alone."""
    params = parameters()
    saved = trained(quietly(Custom(params), **saved_with), params).state_dict()
    again = quietly(Custom(parameters()), **options)
    with pytest.raises(ValueError, match=message):
        again.load_state_dict(saved)
    assert not again.state
    again = quietly(Custom(parameters()), unsigned=[*saved_with.get("unsigned", ()), "of_no_entry"])
    again.load_state_dict(saved)


def test_states_of_our_optimizers_are_other_codes() -> None:
    """AdamW8bit codes exp_avg in units of exp_avg_sq, the wrapper in its own: each refuses the other's codes."""
    (_, optimizer), others = trained_adamw(), parameters()
    ours = trained(shardopt.AdamW8bit(others), others)
    for one, other in ((optimizer, ours), (ours, optimizer)):
        with pytest.raises(ValueError, match="dequantize=True"):
            one.load_state_dict(other.state_dict())
    optimizer.load_state_dict(ours.state_dict(dequantize=True))
    ours.load_state_dict(optimizer.state_dict(dequantize=True))


Damage = Callable[[dict[str, Any]], Any]


def changed(**entries: Any) -> Damage:
    """Changes entries of parameter 0; None removes one."""

    def change(saved: dict[str, Any]) -> dict[str, Any]:
        new = {key: x for key, x in {**saved["state"][0], **entries}.items() if x is not None}
        return {**saved, "state": {**saved["state"], 0: new}}

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(exp_avg_codes=torch.zeros(64, 128)), "exp_avg_codes of torch.float32"),
        (changed(exp_avg_scales=torch.full((64, 1), torch.nan)), "exp_avg_scales"),
        (changed(exp_avg=torch.zeros(3)), r"got exp_avg as Tensor \(3,\), expected Tensor \(64, 128\); load"),
        (changed(exp_avg_codes=None), "got state with .*, expected .*exp_avg_codes"),
        (lambda saved: {**saved, "state": {0: 3}}, "expected a dict of entries by name"),
        (
            lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "unsigned": [3]}]},
            "got state saved with unsigned=",
        ),
        (lambda saved: {}, "load what"),
    ],
)
def test_damaged_state_dicts_are_refused_and_change_nothing(damage: Damage, message: str) -> None:
    _, optimizer = trained_adamw()
    before = [x.clone() for x in bits([], optimizer)]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damage(optimizer.state_dict()))
    assert same(bits([], optimizer), before)


def test_a_stable_embedding_keeps_its_floats_alone() -> None:
    """A stable embedding's moments stay float32; entries of the same names are quantized for other parameters."""
    model = nn.Sequential(shardopt.StableEmbedding(100, 64), nn.Linear(64, 128))
    optimizer = trained(quantize_state(AdamW(params := list(model.parameters()))), params)
    for _ in range(2):
        assert "exp_avg" in optimizer.state[model.get_parameter("0.weight")]
        assert "exp_avg_codes" in optimizer.state[model.get_parameter("1.weight")]
        optimizer.load_state_dict(optimizer.state_dict())


def test_state_dicts_share_no_memory() -> None:
    """A state dict, in codes or floats, shares no memory with the optimizers that made or loaded it; torch's does."""
    params, bare_params, others = parameters(), parameters(), parameters()
    optimizer, bare, again = quantize_state(AdamW(params)), AdamW(bare_params), quantize_state(AdamW(others))
    trained(optimizer, params)
    bare.load_state_dict(optimizer.state_dict(dequantize=True))
    for saved, loading, own in ((optimizer, bare, bare_params), (optimizer, again, others), (bare, again, others)):
        before = [x.clone() for x in bits([], saved)]
        loading.load_state_dict(saved.state_dict(dequantize=True) if loading is bare else saved.state_dict())
        trained(loading, own, range(1))
        assert same(bits([], saved), before)
