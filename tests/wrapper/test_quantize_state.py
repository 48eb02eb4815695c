"""quantize_state: which entries are quantized or kept, steps, and refusals."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import wrapped
from shardopt import quantize_state
from shardopt.codec import CODECS, Moment
from shardopt.layout import FlatShard, Shard
from shardopt.state import slice_spec
from shardopt.state.options import with_defaults
from shardopt.state.slice_spec import SliceSpec
from wrapped import (
    ELEMENTWISE,
    AdamW,
    Custom,
    bits,
    of,
    parameters,
    quietly,
    same,
    set_gradients,
    trained,
    trained_adamw,
)

BLOCKWISE = [name for name, codec in CODECS.items() if codec.blockwise and not codec.shared]


def rounded(x: Tensor, name: str, codec: str, *, signed: bool) -> Tensor:
    """A state entry as one step leaves it to the next."""
    group = with_defaults({"codec": codec})
    spec = SliceSpec.of(Shard(tuple(x.shape), tuple(x.shape)), torch.float32, group, (Moment(name, signed),))
    (value,) = spec.decode(spec.encode([x]))
    return value


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_each_step_rounds_the_state(codec: str) -> None:
    """The bits of a bare optimizer whose state is encoded and decoded after each step."""
    params, bare_params = parameters(), parameters()
    optimizer, bare = quantize_state(AdamW(params), codec=codec), AdamW(bare_params)
    for step in range(4):
        trained(optimizer, params, range(step, step + 1))
        trained(bare, bare_params, range(step, step + 1))
        for param, state in bare.state.items():
            if param.numel() >= 4096 and param.grad is not None:
                state["exp_avg"].copy_(rounded(state["exp_avg"], "exp_avg", codec, signed=True))
                state["exp_avg_sq"].copy_(rounded(state["exp_avg_sq"], "exp_avg_sq", codec, signed=False))
    assert all(map(torch.equal, params, bare_params))
    expected, got = bare.state_dict()["state"], optimizer.state_dict(dequantize=True)["state"]
    assert all(torch.equal(got[i][key], x) for i, state in expected.items() for key, x in state.items())


def test_state_entries() -> None:
    params, optimizer = trained_adamw()
    big, cut, *small = params
    assert set(optimizer.state[big]) == {
        "step",
        *(f"exp_avg{end}" for end in ("_codes", "_scales", "_sq_codes", "_sq_scales")),
    }
    assert optimizer.state[cut]["exp_avg_codes"].shape == cut.shape
    assert optimizer.state[cut]["exp_avg_codes"].dtype == torch.uint8
    assert optimizer.state[cut]["exp_avg_scales"].shape == (40, 2)
    assert optimizer.state[cut]["exp_avg_sq_scales"].shape == (40, 2, 2)
    for param in small:
        assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    assert optimizer.state[big]["step"] == 3  # one step was without a gradient


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch Adagrad", "torch ASGD", "torch Rprop"])
def test_chunks_do_not_show(name: str) -> None:
    results = []
    for working_memory in (0, "200KiB", None):
        params = parameters()
        optimizer = trained(quantize_state(ELEMENTWISE[name](params), working_memory=working_memory), params)
        results.append(bits(params, optimizer))
    assert same(results[0], results[2])
    assert same(results[1], results[2])


def test_state_from_before_is_quantized() -> None:
    params, others = parameters(), parameters()
    bare = trained(AdamW(others), others)
    optimizer = quantize_state(trained(AdamW(params), params))
    again = quantize_state(AdamW(parameters()))
    again.load_state_dict(bare.state_dict())
    assert same(bits([], optimizer), bits([], again))
    assert "exp_avg_codes" in optimizer.state[params[0]]


def test_kept_entries() -> None:
    params = parameters()
    optimizer = trained(quietly(Custom(params), unsigned=("squares",)), params)
    state = optimizer.state[params[0]]
    assert {"start", "count", "rows", "squares_codes", "moment_codes"} <= set(state)
    assert state["squares_scales"].shape == (64, 1, 2)  # unsigned
    assert state["moment_scales"].shape == (64, 1)
    assert torch.equal(state["start"], parameters()[0])
    kept = trained(quietly(Custom(params), keep=("moment",)), params)
    assert "moment" in kept.state[params[0]]
    assert "squares_codes" in kept.state[params[0]]


def test_entries_of_zeros_are_no_copies_of_weights() -> None:
    params = [Parameter(torch.zeros(64, 128))]
    params[0].grad = torch.zeros_like(params[0])
    optimizer = quantize_state(AdamW(params))
    optimizer.step()
    assert "exp_avg_codes" in optimizer.state[params[0]]


@pytest.mark.parametrize("tested", [True, False])
def test_gradients_that_equal_the_weights(tested: bool) -> None:
    """A moment that happens to equal the weights is no copy of them: its name is that of all parameters' moments."""

    class Mine(torch.optim.SGD):
        pass

    param, other = (Parameter(torch.randn(64, 128)) for _ in range(2))
    optimizer = quietly((torch.optim.SGD if tested else Mine)([param, other], lr=0.1, momentum=0.9))
    for _ in range(2):
        (0.5 * param.square().sum() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "momentum_buffer_codes" in optimizer.state[param]
    assert "momentum_buffer_codes" in optimizer.state[other]


@pytest.mark.parametrize("name", ["torch ASGD", "torch Rprop"])
def test_names_that_are_kept(name: str) -> None:
    params = parameters()
    optimizer = trained(quantize_state(ELEMENTWISE[name](params)), params)
    assert {"torch ASGD": "ax", "torch Rprop": "step_size"}[name] in optimizer.state[params[0]]


def test_negative_values_in_an_unsigned_entry() -> None:
    params = parameters()
    optimizer = quietly(Custom(params, square=-1.0), unsigned=("squares",))
    set_gradients(params, 0)
    with pytest.raises(ValueError, match=r"squares: got -\d.* expected numbers >= 0"):
        optimizer.step()
    assert params[0] not in optimizer.state


def test_a_failed_step_leaves_the_state() -> None:
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.fails:
                raise RuntimeError("no more")

    params = parameters()
    inner = Failing(params)
    optimizer = trained(quietly(inner, working_memory=0), params)
    before = copy.deepcopy(bits([], optimizer))
    lists = [group["params"] for group in optimizer.param_groups]
    inner.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        trained(optimizer, params, range(1))
    codes = [x for x in bits([], optimizer) if x.dtype == torch.uint8]
    assert same(codes, [x for x in before if x.dtype == torch.uint8])
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert "exp_avg" not in optimizer.state[params[0]]
    inner.fails = False
    trained(optimizer, params, range(1))


def test_bf16_parameters() -> None:
    """Entries keep their dtypes: the parameter's, or another."""
    params = parameters(torch.bfloat16)
    optimizer = trained(quietly(Custom(params), unsigned=("squares",)), params)
    state = optimizer.state_dict(dequantize=True)["state"][0]
    assert (state["moment"].dtype, state["squares"].dtype) == (torch.bfloat16, torch.float32)
    again = quietly(Custom(parameters(torch.bfloat16)), unsigned=("squares",))
    again.load_state_dict(optimizer.state_dict())
    assert again.state_dict(dequantize=True)["state"][0]["squares"].dtype == torch.float32
    assert same(bits([], again), bits([], optimizer))


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch AdamW fused", "torch NAdam"])
def test_strided_parameters(name: str) -> None:
    """A parameter in another order of memory has the bits of a contiguous one."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        param = Parameter(torch.randn(16, 8, 6, 6).to(memory_format=memory_format))
        optimizer = quantize_state(ELEMENTWISE[name]([param]))
        for _ in range(3):
            param.grad = torch.randn(16, 8, 6, 6).to(memory_format=memory_format)
            optimizer.step()
        results.append(bits([param], optimizer))
    assert same(*results)


def test_nothing_to_quantize_is_told_once() -> None:
    flat = Parameter(torch.zeros(10000))
    optimizer = quantize_state(AdamW([flat]))
    flat.grad = torch.ones(10000)
    with pytest.warns(UserWarning, match="none to quantize"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_names_of_no_entry() -> None:
    """Said once, after the first step that makes state."""
    params = parameters()
    optimizer = quietly(Custom(params), unsigned=iter(("squares", "sqares")), keep=("moments",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # without gradients
    with pytest.warns(UserWarning, match="got 'moments', 'sqares' in keep= or unsigned=") as caught:
        trained(optimizer, params)
    (warning,) = caught
    assert "expected names of state entries, such as count, moment, rows, squares, start" in str(warning.message)
    assert warning.filename == wrapped.__file__
    assert optimizer.state[params[0]]["squares_scales"].shape == (64, 1, 2)


def test_names_that_are_in_the_tables() -> None:
    params = parameters()
    optimizer = quantize_state(AdamW(params), unsigned=("exp_avg_sq",), keep=("exp_avg",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(optimizer, params)


@pytest.mark.parametrize("limit", [1, 100, 700])
@pytest.mark.parametrize("codec", BLOCKWISE)
def test_strips_do_not_show(limit: int, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a parameter, or of a range of one, are computed a strip at a time."""
    x = torch.randn(7, 330)
    shards = (Shard((7, 330), (7, 330)), FlatShard((7, 330), 45, 2000))
    for shard, values in ((shards[0], x), (shards[1], x.reshape(-1)[45:2000])):
        for signed in (True, False):
            group = with_defaults({"codec": codec, "min_quantized_numel": 1})
            spec = SliceSpec.of(shard, torch.float32, group, (Moment("m", signed),))
            monkeypatch.setattr(slice_spec, "CODED_AT_A_TIME", 1 << 20)
            whole = spec.encode([values if signed else values**2])
            decoded = spec.decode(whole)
            monkeypatch.setattr(slice_spec, "CODED_AT_A_TIME", limit)
            strips = spec.encode([values if signed else values**2])
            assert same([*strips.values()], [*whole.values()])
            assert same(spec.decode(whole), decoded)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (of("torch.optim", "LBFGS"), TypeError, "closure several times"),
            (of("torch.optim", "SparseAdam"), TypeError, "sparse"),
            (of("torch.optim", "AdamW", differentiable=True), ValueError, "differentiable"),
            (of("shardopt", "AdamW8bit"), TypeError, "quantized already"),
            (lambda params: quantize_state(AdamW(params)), TypeError, "quantized already"),
            (lambda params: params, TypeError, "torch.optim.Optimizer"),
        ],
    )
    def test_optimizers(self, make: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            quantize_state(make(parameters()))

    def test_an_optimizer_with_codes(self) -> None:
        """Codes of one wrapper mean nothing to another."""
        params = parameters()
        inner = AdamW(params)
        trained(quantize_state(inner), params)
        with pytest.raises(TypeError, match=r"AdamW with exp_avg in codes, expected .* use the result of the first"):
            quantize_state(inner, codec="dynamic8")

    def test_an_optimizer_around_another(self) -> None:
        inner = AdamW(parameters())
        outer = Custom(parameters())
        outer.base = inner  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="Custom around AdamW"):
            quantize_state(outer)

    def test_clipping_by_the_norm_of_all_gradients(self) -> None:
        outer = Custom(parameters())
        outer.param_groups[0]["max_grad_norm"] = 1.0
        with pytest.raises(ValueError, match="max_grad_norm"):
            quantize_state(outer)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"codec": "fp32"}, "codec: got 'fp32'"),
            ({"codec": "log7"}, "codec: got 'log7'"),
            ({"block_size": 100}, "block_size"),
            ({"min_quantized_numel": -1}, "min_quantized_numel"),
            ({"working_memory": "much"}, "working_memory: got 'much'"),
            ({"offload": "step"}, "offload: got 'step'"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            quantize_state(AdamW(parameters()), **options)

    @pytest.mark.parametrize("option", ["keep", "unsigned"])
    def test_a_name_in_place_of_names(self, option: str) -> None:
        with pytest.raises(TypeError, match=f"{option}: got 'exp_avg'"):
            quantize_state(AdamW(parameters()), **{option: "exp_avg"})  # type: ignore[arg-type]

    def test_untested_optimizers_warn_once(self) -> None:
        params = parameters()
        inner = Custom(params)
        with pytest.warns(UserWarning, match=r"Custom, untested .* working_memory=None") as caught:
            trained(quantize_state(inner), params)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "not detected" not in str(caught[0].message)

    def test_copies_of_weights_in_state_from_before(self) -> None:
        """Copies from before may no longer equal the weights, so that they are not found."""
        params = parameters()
        with pytest.warns(UserWarning, match=r"copies of weights in keep=, as they are not detected in state that is"):
            quantize_state(trained(Custom(params), params))
