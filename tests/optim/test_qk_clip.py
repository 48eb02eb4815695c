"""QK-Clip in one process: factors, layouts of heads, low bits, a small transformer, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from attention import Attention, Transformer, max_logits, trained
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

INF = math.inf


def attention(dtype: torch.dtype = torch.float32) -> Attention:
    torch.manual_seed(0)
    return Attention().to(dtype)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def scaled(before: dict[str, Tensor], factors: dict[str, list[float]]) -> dict[str, Tensor]:
    """By name, the factors of a parameter's heads, of equal rows; other parameters stay."""
    expected = dict(before)
    for name, of_heads in factors.items():
        rows = torch.tensor(of_heads).repeat_interleave(len(before[name]) // len(of_heads))
        expected[name] = before[name] * rows.view(-1, *(1,) * (before[name].dim() - 1))
    return expected


def root(*gamma: float) -> list[float]:
    return torch.tensor(gamma).sqrt().tolist()


def test_query_heads_share_key_heads() -> None:
    """The first key head's group takes the least factor of its two query heads; biases go with the weights."""
    model = nn.ModuleDict({"attn": attention()})
    before = weights_of(model)
    found = shardopt.qk_clip_(model, {"attn": torch.tensor([50.0, 400.0, 99.0, 100.0])})
    factors = {f"attn.q_proj.{kind}": root(0.25, 0.25, 1.0, 1.0) for kind in ("weight", "bias")}
    factors |= {f"attn.k_proj.{kind}": root(0.25, 1.0) for kind in ("weight", "bias")}
    assert_same(weights_of(model), scaled(before, factors))
    assert_same(found, {"attn": torch.tensor([50.0, 400.0, 99.0, 100.0])})


def test_each_head_by_itself() -> None:
    model = attention()
    model.k_proj = nn.Linear(64, 64)
    before = weights_of(model)
    shardopt.qk_clip_(model, {"": torch.tensor([-INF, 20.0, 10.0, 40.0])}, threshold=10.0)
    gamma = root(1.0, 0.5, 1.0, 0.25)
    names = [f"{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")]
    assert_same(weights_of(model), scaled(before, dict.fromkeys(names, gamma)))


def test_latent_attention() -> None:
    """Of each head 3 rows by the root, 2 rotary rows by the whole factor; of keys and values the keys alone."""
    model = nn.ModuleDict({"q_b": nn.Linear(7, 20), "kv_b": nn.Linear(7, 4 * (3 + 6)), "k_rotary": nn.Linear(7, 2)})
    before = weights_of(model)
    heads: dict[str, Any] = {"q_b.*": [(3, 0.5), (2, 1.0)], "kv_b.*": [(3, 0.5), (6, 0.0)]}
    shardopt.qk_clip_(model, {"": torch.tensor([100.0, 200.0, 400.0, 50.0])}, heads=heads)
    expected = dict(before)
    for kind in ("weight", "bias"):
        of_query = [f for g in (1.0, 0.5, 0.25, 1.0) for f in (*root(g, g, g), g, g)]
        of_key = [f for g in (1.0, 0.5, 0.25, 1.0) for f in (*root(g, g, g), *[1.0] * 6)]
        expected |= scaled(expected, {f"q_b.{kind}": of_query, f"kv_b.{kind}": of_key})
    assert_same(weights_of(model), expected)


def test_blocks_of_heads() -> None:
    """Queries, keys and values one behind the other; and in groups, as Megatron has them."""
    whole, grouped = nn.Linear(5, 8 + 4 + 4), nn.Linear(5, 16)
    before = [weights_of(module) for module in (whole, grouped)]
    logits = {"": torch.tensor([100.0, 400.0, 1.0, 25.0])}
    blocks: dict[str, Any] = {"weight": [(4, [(2, 0.5)]), (2, [(2, 0.5)]), (2, [(2, 0.0)])]}
    shardopt.qk_clip_(whole, logits, heads=blocks)
    factors = [*root(*[0.25] * 4, *[1.0] * 4), *root(0.25, 0.25, 1.0, 1.0), *[1.0] * 4]
    assert_same(weights_of(whole), scaled(before[0], {"weight": factors}))
    shardopt.qk_clip_(grouped, logits, heads={"weight": [(4, 0.5), (2, 0.5), (2, 0.0)]})
    factors = [*root(*[0.25] * 6), 1.0, 1.0, *[1.0] * 8]
    assert_same(weights_of(grouped), scaled(before[1], {"weight": factors}))


@pytest.mark.parametrize("bits", [None, 24, 32])
def test_low_bits_of_masters(bits: int | None) -> None:
    """Equal those of scaled float32 weights, rounded."""
    model = attention(torch.bfloat16)
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model), master_weight_bits=bits)
    for step in range(3):
        for index, param in enumerate(model.parameters()):
            torch.manual_seed(10 * step + index)
            param.grad = torch.randn_like(param)
        optimizer.step()
    wide = dict(zip(weights_of(model), wide_of(model, optimizer), strict=True))
    gamma = root(0.5, 0.5, 1.0, 1.0)
    expected = scaled(wide, {"q_proj.weight": gamma, "q_proj.bias": gamma})
    expected = scaled(expected, {"k_proj.weight": root(0.5, 1.0), "k_proj.bias": root(0.5, 1.0)})
    shardopt.qk_clip_(model, {"": torch.tensor([200.0, 3.0, 4.0, 5.0])}, optimizer=optimizer)
    got = dict(zip(expected, wide_of(model, optimizer), strict=True))
    optimizer.load_full_precision_parameters(dict(zip(model.parameters(), expected.values(), strict=True)))
    assert_same(got, dict(zip(expected, wide_of(model, optimizer), strict=True)))  # that rounds as well
    assert not torch.equal(got["q_proj.weight"], wide["q_proj.weight"])


def wide_of(model: nn.Module, optimizer: ShardedOptimizer) -> list[Tensor]:
    wide = optimizer.full_precision_parameters()
    return [wide[param] for param in model.parameters()]


def test_small_transformer() -> None:
    """Logits that grow beyond the threshold come down to it; those of a model that was never clipped stay above."""
    clipped, free = (trained(threshold) for threshold in (5.0, None))
    assert max(float(x.max()) for x in max_logits(free).values()) > 10.0
    before = max_logits(clipped)
    shardopt.qk_clip_(clipped, before, threshold=5.0)
    assert before.keys() == {"blocks.0", "blocks.1"}
    name = "blocks.0"  # the other's inputs change, as the first one's outputs do
    group = before[name].view(2, 2).amax(1).repeat_interleave(2)
    assert bool((group > 5.0).any())
    expected = before[name] * torch.where(group > 5.0, 5.0 / group, 1.0)
    # Each of the roots and products rounds a few times.
    torch.testing.assert_close(max_logits(clipped)[name], expected, rtol=1e-5, atol=0)


def test_nothing_above_the_threshold_changes_nothing() -> None:
    model = Transformer()
    before = weights_of(model)
    shardopt.qk_clip_(model, {"blocks.0": torch.full((4,), 100.0), "blocks.1": torch.full((4,), -INF)})
    assert_same(weights_of(model), before)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"threshold": 0.0}, ValueError, "threshold: got 0.0"),
        ({"threshold": INF}, ValueError, "threshold: got inf"),
        ({"max_logits": {"": torch.full((4,), math.nan)}}, FloatingPointError, "got NaN or infinite logits"),
        ({"max_logits": {"": torch.tensor([1.0, INF, 1.0, 1.0])}}, FloatingPointError, "got NaN or infinite logits"),
        ({"max_logits": {"": torch.ones(2, 2)}}, ValueError, r"got a tensor of shape \(2, 2\)"),
        ({"max_logits": {"": [1.0, 2.0]}}, ValueError, "got a list, expected a tensor of floats"),
        ({"max_logits": [torch.ones(4)]}, TypeError, "max_logits: got a list, expected a mapping"),
        ({"heads": ["q_proj.*"]}, TypeError, "heads: got a list, expected a mapping"),
        ({"max_logits": {"": torch.ones(4, dtype=torch.int64)}}, ValueError, "got a tensor of shape .* of torch.int64"),
        (
            {"max_logits": {"attn": torch.ones(4)}},
            ValueError,
            "matches no parameter of 'attn', expected one of a modul",
        ),
        ({"max_logits": {"": torch.full((3,), 200.0)}}, ValueError, "got 'query' for 64 rows and 3 heads"),
        ({"max_logits": {"": torch.full((1,), 200.0)}}, ValueError, "got 'key' for 32 rows and 1 heads"),
        ({"heads": {"query.*": "query"}}, ValueError, "heads.'query..'.: got a pattern that matches no parameter"),
        ({"heads": {"k_proj.*": "key"}}, ValueError, "got 'key' for 32 rows"),
        ({"heads": {"q_proj.*": "values"}}, ValueError, "got 'values' for 64 rows"),
        ({"heads": {"q_proj.*": [(3, 0.5)]}}, ValueError, "got 64 rows and heads of 63 rows in all"),
        ({"heads": {"q_proj.*": [(64, 0.5)], "k_proj.*": [(12, 0.5), (4, 0.0)]}}, None, ""),
        ({"heads": {"q_proj.*": [(8, 0.5)]}}, ValueError, "got 8 heads beside 4"),
        ({"heads": {"q_proj.*": [(3, [(16, 0.5)])]}}, ValueError, "got 64 rows and heads of 48 rows"),
        *(
            ({"heads": {"q_proj.*": layout}}, ValueError, r"q_proj\.weight: got heads of .*, expected 'query'")
            for layout in (5, [64], [(64, "query")], [(64, -0.5)], [(-1, 0.5), (17, 0.5)], [(4, [16])], [(2.0, 0.5)])
        ),
        (  # 2 heads of 32 keys, and 3 blocks of 32 values, would share no factors with 6 queries
            {
                "max_logits": {"": torch.full((6,), 200.0)},
                "heads": {
                    "q_proj.*": [(6, [(10, 0.5)]), (2, [(2, 0.5)])],
                    "k_proj.*": [(3, [(10, 0.5)]), (1, [(2, 0)])],
                },
            },
            ValueError,
            "k_proj.weight: got 3 heads beside 6 in max_logits.* and 2 where they are fewest",
        ),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])},
            ValueError,
            "optimizer: got one without q_proj",
        ),
    ],
    ids=str,
)
def test_refusals(changed: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    model = attention()
    before = weights_of(model)
    given: dict[str, Any] = {"max_logits": {"": torch.full((4,), 200.0)}, **changed}
    if error is None:
        shardopt.qk_clip_(model, **given)
        assert not torch.equal(model.q_proj.weight, before["q_proj.weight"])
        return
    with pytest.raises(error, match=message):
        shardopt.qk_clip_(model, **given)
    assert_same(weights_of(model), before)


def test_16_bits_need_the_optimizer() -> None:
    model = attention(torch.bfloat16)
    logits = {"": torch.full((4,), 200.0)}
    with pytest.raises(ValueError, match=r"optimizer: got None for q_proj\.weight of torch.bfloat16"):
        shardopt.qk_clip_(model, logits)
    before = weights_of(model)
    shardopt.qk_clip_(model, logits, optimizer=torch.optim.SGD(model.parameters()))
    expected = {name: x.float() * 0.5**0.5 for name, x in before.items() if "v_proj" not in name}
    assert_same(weights_of(model), before | {name: x.bfloat16() for name, x in expected.items()})


def test_parameters_of_zero_are_refused() -> None:
    model = attention()
    model.q_proj.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"q_proj\.weight: got a parameter of DeepSpeed's ZeRO"):
        shardopt.qk_clip_(model, {"": torch.full((4,), 200.0)})
