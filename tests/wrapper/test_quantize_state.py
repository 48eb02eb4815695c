"""quantize_state: which entries are quantized or kept, refusals, and the interface of an optimizer."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

import shardopt
from shardopt import quantize_state
from shardopt.codec import CODECS, Moment
from shardopt.layout import FlatShard, Shard
from shardopt.state import slice_state
from shardopt.state.options import with_defaults
from shardopt.state.slice_state import SliceState
from wrapped import ELEMENTWISE, of, parameters, set_gradients

AdamW = ELEMENTWISE["torch AdamW foreach"]
BLOCKWISE = [name for name, codec in CODECS.items() if codec.blockwise]


class Custom(Optimizer):
    """An optimizer that nobody has tested, with an entry of each kind."""

    def __init__(self, params: Iterable[Parameter], lr: float = 0.1, square: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "square": square})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["start"] = param.detach().clone()
                    state["squares"] = torch.zeros_like(param, dtype=torch.float32)
                    state["moment"] = torch.zeros_like(param)
                    state["count"] = 0
                    state["rows"] = torch.zeros(len(param))
                state["count"] += 1
                state["squares"] += group["square"] * param.grad.float() ** 2
                state["moment"].lerp_(param.grad, 0.1)
                with torch.no_grad():
                    param.sub_(group["lr"] * state["moment"] / (1 + state["squares"].sqrt().to(param.dtype)))


def custom(params: list[Parameter], **options: Any) -> Custom:
    return Custom(params, **options)


def quietly(optimizer: Optimizer, **options: Any) -> shardopt.wrapper.QuantizedState:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return quantize_state(optimizer, **options)


def trained(optimizer: Optimizer, params: list[Parameter], steps: range = range(4)) -> Any:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()
    return optimizer


def bits(params: list[Parameter], optimizer: Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    entries = [x for index in sorted(state) for _, x in sorted(state[index].items()) if isinstance(x, Tensor)]
    return [*(p.detach() for p in params), *entries]


def same(x: list[Tensor], y: list[Tensor]) -> bool:
    return len(x) == len(y) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(x, y, strict=True))


def rounded(x: Tensor, name: str, codec: str, *, signed: bool) -> Tensor:
    """A state entry as one step leaves it to the next."""
    group = with_defaults({"codec": codec})
    spec = SliceState.of(Shard(tuple(x.shape), tuple(x.shape)), torch.float32, group, (Moment(name, signed),))
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
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
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
    params, other = parameters(), parameters()
    optimizer = quantize_state(trained(AdamW(params), params))
    again = quantize_state(AdamW(other))
    again.load_state_dict(_bare_state())
    assert same(bits([], optimizer), bits([], again))
    assert "exp_avg_codes" in optimizer.state[params[0]]


def _bare_state() -> dict[str, Any]:
    params = parameters()
    return trained(AdamW(params), params).state_dict()


def test_kept_entries() -> None:
    params = parameters()
    optimizer = trained(quietly(custom(params), unsigned=("squares",)), params)
    state = optimizer.state[params[0]]
    assert {"start", "count", "rows", "squares_codes", "moment_codes"} <= set(state)
    assert state["squares_scales"].shape == (64, 1, 2)  # unsigned
    assert state["moment_scales"].shape == (64, 1)
    assert torch.equal(state["start"], parameters()[0])
    kept = trained(quietly(custom(params), keep=("moment",)), params)
    assert "moment" in kept.state[params[0]]
    assert "squares_codes" in kept.state[params[0]]


def test_entries_of_zeros_are_no_copies_of_weights() -> None:
    params = [Parameter(torch.zeros(64, 128))]
    params[0].grad = torch.zeros_like(params[0])
    optimizer = quantize_state(AdamW(params))
    optimizer.step()
    assert "exp_avg_codes" in optimizer.state[params[0]]


@pytest.mark.parametrize("name", ["torch ASGD", "torch Rprop"])
def test_names_that_are_kept(name: str) -> None:
    params = parameters()
    optimizer = trained(quantize_state(ELEMENTWISE[name](params)), params)
    assert {"torch ASGD": "ax", "torch Rprop": "step_size"}[name] in optimizer.state[params[0]]


def test_negative_values_in_an_unsigned_entry() -> None:
    params = parameters()
    optimizer = quietly(custom(params, square=-1.0), unsigned=("squares",))
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
    optimizer = trained(quietly(custom(params), unsigned=("squares",)), params)
    state = optimizer.state_dict(dequantize=True)["state"][0]
    assert (state["moment"].dtype, state["squares"].dtype) == (torch.bfloat16, torch.float32)
    again = quietly(custom(parameters(torch.bfloat16)), unsigned=("squares",))
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


@pytest.mark.parametrize("limit", [1, 100, 700])
@pytest.mark.parametrize("codec", BLOCKWISE)
def test_strips_do_not_show(limit: int, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of a parameter, or of a range of one, are computed a strip at a time."""
    x = torch.randn(7, 330)
    shards = (Shard((7, 330), (7, 330)), FlatShard((7, 330), 45, 2000))
    for shard, values in ((shards[0], x), (shards[1], x.reshape(-1)[45:2000])):
        for signed in (True, False):
            group = with_defaults({"codec": codec, "min_quantized_numel": 1})
            spec = SliceState.of(shard, torch.float32, group, (Moment("m", signed),))
            monkeypatch.setattr(slice_state, "CODED_AT_A_TIME", 1 << 20)
            whole = spec.encode([values if signed else values**2])
            decoded = spec.decode(whole)
            monkeypatch.setattr(slice_state, "CODED_AT_A_TIME", limit)
            strips = spec.encode([values if signed else values**2])
            assert same([*strips.values()], [*whole.values()])
            assert same(spec.decode(whole), decoded)


class TestStateDict:
    def test_round_trip(self) -> None:
        params, others = parameters(), parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = quantize_state(AdamW(others), working_memory=0)
        again.load_state_dict(torch.load(file, weights_only=True))
        with torch.no_grad():
            for x, y in zip(others, params, strict=True):
                x.copy_(y)
        for each, own in ((optimizer, params), (again, others)):
            trained(each, own, range(4, 7))
        assert same(bits(others, again), bits(params, optimizer))

    def test_a_loaded_state_is_a_copy(self) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        saved = optimizer.state_dict()
        before = saved["state"][0]["exp_avg_codes"].clone()
        again = quantize_state(AdamW(parameters()))
        again.load_state_dict(saved)
        trained(again, again.param_groups[0]["params"], range(1))
        assert torch.equal(before, optimizer.state[params[0]]["exp_avg_codes"])

    def test_to_the_bare_optimizer_and_back(self) -> None:
        params, others = parameters(), parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        bare = AdamW(others)
        bare.load_state_dict(optimizer.state_dict(dequantize=True))
        trained(bare, others, range(1))
        back = quantize_state(AdamW(parameters()))
        back.load_state_dict(optimizer.state_dict(dequantize=True))
        assert same(bits([], back), bits([], optimizer))

    def test_copies_of_weights_stay_what_they_are(self) -> None:
        params = parameters()
        optimizer = trained(quietly(custom(params)), params)
        again = quietly(custom(parameters()))
        again.load_state_dict(optimizer.state_dict())
        assert same(bits([], again), bits([], optimizer))
        trained(again, again.param_groups[0]["params"])
        assert "start" in again.state[again.param_groups[0]["params"][0]]

    def test_another_format(self) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        for options, name in (({"codec": "dynamic8"}, "codec"), ({"block_size": 64}, "block_size")):
            again = quantize_state(AdamW(parameters()), **options)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"saved with {name}="):
                again.load_state_dict(optimizer.state_dict())
            assert not again.state

    def test_states_of_our_optimizers_are_other_codes(self) -> None:
        """AdamW8bit codes exp_avg in units of exp_avg_sq, the wrapper in its own: each refuses the other's codes."""
        params, others = parameters(), parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        ours = trained(shardopt.AdamW8bit(others), others)
        with pytest.raises(ValueError, match="dequantize=True"):
            optimizer.load_state_dict(ours.state_dict())
        with pytest.raises(ValueError, match="dequantize=True"):
            ours.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(ours.state_dict(dequantize=True))
        ours.load_state_dict(optimizer.state_dict(dequantize=True))

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("exp_avg_codes", torch.zeros(3, 3, dtype=torch.uint8), "exp_avg_codes"),
            ("exp_avg_codes", torch.zeros(64, 128), "exp_avg_codes of torch.float32"),
            ("exp_avg_scales", torch.full((64, 1), torch.nan), "exp_avg_scales"),
        ],
    )
    def test_damage(self, key: str, value: Tensor, message: str) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        saved = optimizer.state_dict()
        before = [x.clone() for x in bits([], optimizer)]
        saved["state"][0] = {**saved["state"][0], key: value}
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert same(bits([], optimizer), before)

    def test_hooks(self) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        seen: list[Any] = []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append(o))
        optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(d["more"]))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == [optimizer, 1, "loaded"]


class TestProtocol:
    def test_step_hooks_run_once_per_step(self) -> None:
        params = parameters()
        optimizer = quantize_state(AdamW(params), working_memory=0)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda o, *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda o, *_: seen.append("post"))
        trained(optimizer, params, range(2))
        assert seen == ["pre", "post"] * 2

    def test_schedulers(self) -> None:
        params, bare_params = parameters(), parameters()
        for optimizer, own in (
            (quantize_state(AdamW(params), min_quantized_numel=2**40), params),
            (AdamW(bare_params), bare_params),
        ):
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
            for step in range(4):
                trained(optimizer, own, range(step, step + 1))
                scheduler.step()
        assert all(map(torch.equal, params, bare_params))

    @pytest.mark.parametrize("name", ["torch AdamW foreach", "torch AdamW fused"])
    def test_grad_scaler(self, name: str) -> None:
        """Gradients are unscaled once, and a step with an infinite one is left out."""
        params, scaled = parameters(), parameters()
        optimizer, again = (quantize_state(ELEMENTWISE[name](own), working_memory=0) for own in (params, scaled))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        trained(optimizer, params, range(1))
        set_gradients(scaled, 0)
        for param in scaled:
            assert param.grad is not None
            param.grad *= 8
        scaler.step(again)
        scaler.update()
        assert same(bits(scaled, again), bits(params, optimizer))
        set_gradients(scaled, 1)
        assert scaled[0].grad is not None
        scaled[0].grad[0, 0] = torch.inf
        scaler.step(again)
        assert same(bits(scaled, again), bits(params, optimizer))

    def test_closure(self) -> None:
        params = parameters()
        optimizer = quantize_state(AdamW(params), working_memory=0)
        calls: list[bool] = []

        def closure() -> float:
            calls.append(torch.is_grad_enabled())
            set_gradients(params, 0)
            return 2.5

        assert optimizer.step(closure) == 2.5
        assert calls == [True]
        assert len(optimizer.state) == 4

    def test_param_groups(self) -> None:
        params = parameters()
        inner = AdamW(params[:2])
        optimizer = quantize_state(inner, working_memory=0)
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        assert optimizer.param_groups is inner.param_groups
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
        trained(optimizer, params)
        assert set(optimizer.state) == set(params)
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        before = bits(params, optimizer)
        optimizer.step()  # without gradients
        assert same(bits(params, optimizer), before)

    def test_named_parameters(self) -> None:
        model = nn.Linear(128, 64)
        optimizer = quantize_state(torch.optim.AdamW(model.named_parameters()), working_memory=0)
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies(self, duplicate: Any) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params), working_memory=0), params)
        others, again = duplicate((params, optimizer))
        for each, own in ((optimizer, params), (again, others)):
            trained(each, own, range(4, 6))
        assert same(bits(others, again), bits(params, optimizer))
        assert again.state is not optimizer.state

    def test_methods_of_the_optimizer_inside(self) -> None:
        pytest.importorskip("schedulefree")
        params, bare_params = parameters(), parameters()
        make = ELEMENTWISE["schedulefree AdamW"]
        optimizer, bare = quantize_state(make(params), min_quantized_numel=2**40), make(bare_params)
        for each, own in ((optimizer, params), (bare, bare_params)):
            each.train()
            trained(each, own)
            each.eval()
        assert all(map(torch.equal, params, bare_params))
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            optimizer.nothing()

    def test_portable_checkpoints_take_other_optimizers(self, tmp_path: Path) -> None:
        model = nn.Linear(128, 64)
        optimizer = quantize_state(torch.optim.AdamW(model.parameters()))
        with pytest.raises(TypeError, match=r"QuantizedState, expected one of shardopt's"):
            shardopt.checkpoint.save(tmp_path / "checkpoint", model, optimizer)

    def test_memory_report(self) -> None:
        params = parameters()
        optimizer = trained(quantize_state(AdamW(params)), params)
        report = shardopt.memory_report(optimizer)
        assert report.host.scales > 0
        assert report.host.state < 2.2 * sum(param.numel() for param in params)


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

    def test_an_optimizer_around_another(self) -> None:
        inner = AdamW(parameters())
        outer = custom(parameters())
        outer.base = inner  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="Custom around AdamW"):
            quantize_state(outer)

    def test_clipping_by_the_norm_of_all_gradients(self) -> None:
        outer = custom(parameters())
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
        inner = custom(params)
        with pytest.warns(UserWarning, match=r"Custom, untested .* working_memory=None") as caught:
            trained(quantize_state(inner), params)
        assert len(caught) == 1
        assert caught[0].filename == __file__
