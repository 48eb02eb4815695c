"""Parameters and gradients that are not contiguous are stepped as their contiguous copies are, bit for bit."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from helpers import CODEC_NAMES, RULES, everything, with_gradient
from ranks.layouts import values
from ranks.offload import late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer, stepper

BF16 = torch.bfloat16
OPTIONS = {"min_quantized_numel": 64, "block_size": 32}


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def _within(x: Tensor) -> Tensor:
    """Columns of a wider matrix, which is zero elsewhere."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 9, dtype=x.dtype)
    return wide[..., 4:-5].copy_(x)


def _every_third(x: Tensor) -> Tensor:
    return torch.zeros(3 * x.shape[0], *x.shape[1:], dtype=x.dtype)[1::3].copy_(x)


def _reversed_dims(x: Tensor) -> Tensor:
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


Layout = Callable[[Tensor], Tensor]

#: The parameters of :func:`make`: their shapes, and how they lie in memory.
LAYOUTS: tuple[tuple[tuple[int, ...], Layout], ...] = (
    ((33, 7, 3, 3), _channels_last),
    ((40, 96), Tensor.contiguous),
    ((64, 32, 3, 3), _channels_last),
    ((70, 130), _transposed),
    ((48, 40), _within),
    ((9, 257), _every_third),
    ((5, 11, 13), _reversed_dims),
    ((20, 30, 1, 1), _channels_last),
    ((300,), _every_third),
    ((), Tensor.contiguous),
)


def make(
    rule: str = "adamw", *, strided: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> ShardedOptimizer:
    """An optimizer of parameters that lie in memory as :data:`LAYOUTS` say, or contiguous ones."""
    found = [values(shape, index, dtype) for index, (shape, _) in enumerate(LAYOUTS)]
    params = [Parameter(layout(x) if strided else x) for x, (_, layout) in zip(found, LAYOUTS, strict=True)]
    groups = [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}]
    return RULES[rule].make(groups, **{**OPTIONS, **options})


def params_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(optimizer: ShardedOptimizer, t: int, grad_dtype: torch.dtype | None = None) -> None:
    """Gradients laid out as the parameters are, contiguous, and otherwise, in turn; in step 2 some have none.

    Where all parameters are contiguous, so are the gradients.
    """
    params = params_of(optimizer)
    strided = any(not param.is_contiguous() for param in params)
    for index, (param, (_, layout)) in enumerate(zip(params, LAYOUTS, strict=True)):
        gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype).to(grad_dtype or param.dtype)
        turn = (t + index) % 4
        if strided:
            gradient = (layout, Tensor.contiguous, _reversed_dims, layout)[turn](gradient)
        with_gradient(param, gradient)
        if t == 2 and turn == 1:
            param.grad = None


def run(optimizer: ShardedOptimizer, steps: Sequence[int] = range(5), **options: Any) -> ShardedOptimizer:
    for t in steps:
        set_gradients(optimizer, t, **options)
        optimizer.step()
    return optimizer


def assert_equal(got: ShardedOptimizer, expected: ShardedOptimizer) -> None:
    """The same bits, and state that is contiguous."""
    got.synchronize()
    assert_same(everything(got), everything(expected))
    for state in got.state.values():
        assert all(value.is_contiguous() for value in state.values())


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_as_the_contiguous_copies(rule: str, codec: str) -> None:
    optimizer = make(rule, codec=codec)
    strides = [param.stride() for param in params_of(optimizer)]
    run(optimizer)
    assert_equal(optimizer, run(make(rule, strided=False, codec=codec)))
    assert [param.stride() for param in params_of(optimizer)] == strides


def test_what_lies_between_the_elements_stays() -> None:
    wide = torch.full((48, 60), 3.0)
    param = Parameter(wide[:, 7:53])
    optimizer = RULES["adamw"].make([param], **OPTIONS)
    for t in range(3):
        param.grad = values((48, 46), t)
        optimizer.step()
    assert (wide[:, :7] == 3).all()
    assert (wide[:, 53:] == 3).all()
    assert (wide[:, 7:53] != 3).any()


WEIGHTS: list[dict[str, Any]] = [
    {"master_weight_bits": 24},
    {"master_weight_bits": 32},
    {"stochastic_rounding": True, "stochastic_rounding_seed": 3},
]


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_weights_of_bfloat16(rule: str, weights: dict[str, Any], grad_dtype: torch.dtype | None) -> None:
    got, expected = (make(rule, strided=strided, dtype=BF16, **weights) for strided in (True, False))
    for optimizer in (got, expected):
        run(optimizer, grad_dtype=grad_dtype)
    assert_equal(got, expected)


@pytest.mark.parametrize("bits", [24, 32])
def test_weights_of_float16(bits: int) -> None:
    got, expected = (run(make(strided=s, dtype=torch.float16, master_weight_bits=bits)) for s in (True, False))
    assert_equal(got, expected)


@pytest.mark.parametrize("offload", ["state", "step"])
@pytest.mark.parametrize("options", [{}, {"dtype": BF16, "master_weight_bits": 24}], ids=["fp32", "bf16"])
def test_offload(offload: str, options: dict[str, Any]) -> None:
    """In chunks that are smaller than a parameter, with copies that come as late as they may."""
    expected = run(make(strided=False, **options))
    with offload_from_cpu(8192, late_transfers(offload)):
        assert_equal(run(make(offload=offload, **options)), expected)


class Conv(nn.Module):
    """Convolutions and a transposed matrix."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 33, 3, padding=1)
        self.second = nn.Conv2d(33, 12, 3)
        self.head = Parameter(torch.randn(12, 40).T)
        self.to(dtype, memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images).relu()).mean((2, 3)) @ self.head.T


def backward(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    images = values((4, 3, 8, 8), number).to(dtype)
    model(images.contiguous(memory_format=torch.channels_last)).float().square().mean().backward()


@pytest.mark.parametrize("offload", [None, "state", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_released_gradients(offload: str | None, dtype: torch.dtype) -> None:
    with offload_from_cpu(8192):
        models = [Conv(dtype) for _ in range(2)]
        options = {**OPTIONS, "stochastic_rounding": True}
        released, ordinary = (
            RULES["adamw"].make(model.parameters(), **options, offload=how)
            for model, how in zip(models, (offload, None), strict=True)
        )
        shardopt.release_gradients(models[0], released)
        assert not models[0].first.weight.is_contiguous()
        for number in range(4):
            for model, optimizer in zip(models, (released, ordinary), strict=True):
                backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(released, ordinary)


def test_model_that_changes_its_layout() -> None:
    """Tables are made anew where parameters moved; state stays as it is."""
    model, expected = nn.Conv2d(7, 33, 3), nn.Conv2d(7, 33, 3)
    expected.load_state_dict(model.state_dict())
    optimizers = [RULES["adamw"].make(m.parameters(), **OPTIONS) for m in (model, expected)]
    for t, memory_format in enumerate([torch.channels_last, torch.contiguous_format, torch.channels_last]):
        model.to(memory_format=memory_format)
        for _ in range(2):
            for m, optimizer in zip((model, expected), optimizers, strict=True):
                for index, param in enumerate(m.parameters()):
                    param.grad = torch.empty_like(param).copy_(values(tuple(param.shape), 10 * t + index))
                optimizer.step()
            assert_equal(*optimizers)


def test_strides_that_change_in_place() -> None:
    """The memory of a square matrix stays where it is; its rows become columns."""
    got, expected = (Parameter(values((40, 40), 1)[:, ::1]) for _ in range(2))
    for param in (got, expected):
        param.data = torch.zeros(40, 80)[:, ::2].copy_(param.data)
    optimizers = [RULES["adamw"].make([param], **OPTIONS) for param in (got, expected)]
    for t in range(6):
        if t == 3:
            got.data = got.data.T
            expected.data = expected.data.T.contiguous()
        for param, optimizer in zip((got, expected), optimizers, strict=True):
            param.grad = values((40, 40), 10 + t)
            optimizer.step()
        assert_equal(*optimizers)


def test_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through gradients that come, go, and lie in memory in another way."""
    made: list[int] = []
    original = stepper.make_plan
    monkeypatch.setattr(stepper, "make_plan", lambda *args: made.append(0) or original(*args))
    run(make(), range(8))
    assert len(made) == 1


def test_no_memory_is_kept() -> None:
    optimizer = run(make(), range(2))
    param = params_of(optimizer)[0]
    gone = [weakref.ref(param.grad.untyped_storage()), weakref.ref(param)]
    param.grad = None
    optimizer.param_groups[0]["params"].remove(param)
    del optimizer.state[param], param
    assert [ref() for ref in gone] == [None, None]


class _Copies(TorchDispatchMode):
    """Notes the most bytes of copies that are alive at once.

    Args:
        room: copies of more bytes are refused.
    """

    def __init__(self, room: int = 1 << 40) -> None:
        super().__init__()
        self._room = room
        self._alive: list[tuple[weakref.ref[Any], int]] = []
        self.most = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            if result.nbytes > self._room:
                raise torch.OutOfMemoryError(f"{result.nbytes} bytes")
            self._alive.append((weakref.ref(result.untyped_storage()), result.nbytes))
            self.count += 1
            self.most = max(self.most, sum(nbytes for storage, nbytes in self._alive if storage() is not None))
        return result


@pytest.mark.parametrize("strided_gradients", [False, True])
def test_one_copy_at_a_time(strided_gradients: bool) -> None:
    """A step takes memory for the largest parameter that is not contiguous, and its gradient if that is not, either."""
    params = [Parameter(torch.zeros(width, 512).T) for width in (256, 300, 128)]
    params.append(Parameter(torch.zeros(512, 1024)))
    optimizer = RULES["adamw"].make(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param) if strided_gradients else torch.zeros(param.shape)
        with _Copies() as copies:
            optimizer.step()
    assert copies.most == 512 * 300 * 4 * (2 if strided_gradients else 1)
    assert copies.count == (6 if strided_gradients else 3)


def test_no_memory_for_a_copy() -> None:
    """Nothing was changed, and the next step goes well."""
    got, expected = (run(make(strided=strided), range(2)) for strided in (True, False))
    before = everything(got)
    set_gradients(got, 3)
    largest = max(param.nbytes for param in params_of(got))
    with _Copies(room=largest - 1), pytest.raises(torch.OutOfMemoryError):
        got.step()
    assert_same(everything(got), before)
    for optimizer in (got, expected):
        run(optimizer, [3])
    assert_equal(got, expected)


def test_gradients_that_are_no_numbers() -> None:
    """Skipped and counted; or an error that leaves everything as it is."""
    for nonfinite in ("skip", "raise"):
        got, expected = (run(make(strided=strided, nonfinite=nonfinite), range(2)) for strided in (True, False))
        before = everything(got)
        for optimizer in (got, expected):
            set_gradients(optimizer, 3)
            params_of(optimizer)[3].grad[5, 7] = torch.nan
            if nonfinite == "raise":
                with pytest.raises(
                    FloatingPointError, match=r"parameter 3 of param group 0 \(70, 130\): got a gradient"
                ):
                    optimizer.step()
            else:
                optimizer.step()
                assert optimizer.nonfinite_count == 1
        if nonfinite == "raise":
            assert_same(everything(got), before)
        assert_equal(got, expected)


def test_grad_scaler() -> None:
    got, expected = (run(make(strided=strided), range(1)) for strided in (True, False))
    for found_inf in (0.0, 1.0, 0.0):
        before = everything(got)
        for optimizer in (got, expected):
            set_gradients(optimizer, 1)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(found_inf)
            optimizer.step()
        assert_equal(got, expected)
        if found_inf:
            assert_same(everything(got), before)


def test_a_parameter_that_comes_to_share_memory_is_refused() -> None:
    """At the same address, with the same shape."""
    memory = torch.zeros(40, 80)
    param = Parameter(memory[:, ::2])
    optimizer = RULES["adamw"].make([param], **OPTIONS)
    for t in range(2):
        param.grad = values((40, 40), t)
        optimizer.step()
    param.data = memory[0, ::2].expand(40, 40)
    with pytest.raises(RuntimeError, match="whose elements share memory"):
        optimizer.step()


def test_expanded_gradients() -> None:
    got, expected = (RULES["adamw"].make([Parameter(values((48, 40), 1))], **OPTIONS) for _ in range(2))
    for t in range(3):
        gradient = values((40,), t).expand(48, 40)
        params_of(got)[0].grad, params_of(expected)[0].grad = gradient, gradient.contiguous()
        got.step()
        expected.step()
        assert_equal(got, expected)


# Saving and loading.


def trained(*, channels_last: bool = True, steps: int = 2, **options: Any) -> tuple[Conv, ShardedOptimizer]:
    """Gradients are those of a contiguous model, in the layout of the parameters."""
    model, source = Conv(options.pop("dtype", torch.float32)), Conv()
    if not channels_last:
        model.to(memory_format=torch.contiguous_format)
        model.head = Parameter(model.head.detach().contiguous())
    optimizer = RULES["adamw"].make(model.parameters(), **{**OPTIONS, **options})
    for number in range(steps):
        advance(model, optimizer, source, number)
    return model, optimizer


def advance(model: nn.Module, optimizer: ShardedOptimizer, source: nn.Module, number: int) -> None:
    source.zero_grad()
    backward(source, number)
    for param, other in zip(model.parameters(), source.parameters(), strict=True):
        param.grad = torch.empty_like(param).copy_(other.grad)
    optimizer.step()


FORMATS: list[dict[str, Any]] = [
    {},
    {"codec": "fp32"},
    {"dtype": BF16, "master_weight_bits": 24},
    {"dtype": BF16, "master_weight_bits": 32},
]


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("how", ["checkpoint", "safetensors", "state dict"])
@pytest.mark.parametrize("saved_strided", [True, False])
def test_round_trip(tmp_path: Path, how: str, options: dict[str, Any], saved_strided: bool) -> None:
    """Between models that lie in memory in different ways; steps go on with the same bits."""
    model, optimizer = trained(channels_last=saved_strided, **options)
    other, loaded = trained(channels_last=not saved_strided, steps=1, **options)
    if how == "checkpoint":
        shardopt.checkpoint.save(tmp_path / "saved", model, optimizer)
        shardopt.checkpoint.load(tmp_path / "saved", other, loaded)
    elif how == "safetensors":
        shardopt.checkpoint.save_safetensors(tmp_path / "saved.safetensors", model, optimizer)
        shardopt.checkpoint.load_safetensors(tmp_path / "saved.safetensors", other, loaded)
    else:
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
    assert_equal(loaded, optimizer)
    for each in ((model, optimizer), (other, loaded)):
        advance(*each, Conv(), 7)
    assert_equal(loaded, optimizer)


@pytest.mark.parametrize("load", [ShardedOptimizer.load_state_dict, shardopt.checkpoint.import_state])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_torch_state(codec: str, load: Callable[[ShardedOptimizer, Any], object]) -> None:
    """torch keeps moments laid out as the parameter is; and takes ours."""
    model, source = Conv(), Conv()
    theirs = torch.optim.AdamW(model.parameters())
    for number in range(2):
        advance(model, theirs, source, number)
    assert not theirs.state[model.first.weight]["exp_avg"].is_contiguous()
    contiguous = copy.deepcopy(theirs.state_dict())
    for state in contiguous["state"].values():
        state.update({key: value.contiguous() for key, value in state.items()})
    got, expected = (shardopt.AdamW(model.parameters(), codec=codec, **OPTIONS) for _ in range(2))
    load(got, theirs.state_dict())
    load(expected, contiguous)
    assert_equal(got, expected)
    theirs.load_state_dict(got.state_dict(dequantize=True))
    for optimizer in (got, theirs):
        advance(model, optimizer, source, 2)


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_full_precision(options: dict[str, Any]) -> None:
    (model, optimizer), (other, expected) = (trained(channels_last=c, **options) for c in (True, False))
    weights, expected_weights = optimizer.full_precision_parameters(), expected.full_precision_parameters()
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(weights[param], expected_weights[same])
        assert weights[param].is_contiguous()
    optimizer.load_full_precision_parameters({param: _reversed_dims(x * 1.01) for param, x in weights.items()})
    expected.load_full_precision_parameters({param: x * 1.01 for param, x in expected_weights.items()})
    assert_equal(optimizer, expected)


def test_reports() -> None:
    """Numbers are those of the contiguous copies."""
    (_, got), (_, expected) = (trained(channels_last=c, dtype=BF16) for c in (True, False))
    assert shardopt.memory_report(got) == shardopt.memory_report(expected)
    with pytest.warns(RuntimeWarning, match="too small"):
        found = shardopt.check_numerics(got, lr=1e-6)
    with pytest.warns(RuntimeWarning, match="too small"):
        assert shardopt.check_numerics(expected, lr=1e-6) == found
