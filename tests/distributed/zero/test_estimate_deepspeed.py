"""The estimate under DeepSpeed is what an engine's optimizer holds, within 1%."""

from __future__ import annotations

from typing import Any

import pytest

import shardopt
from estimate_problem import TOKENS, Layers, assert_near, both, estimated_model
from ranks.deepspeed import OFFLOAD, WITHOUT_MASTERS, make_engine, masters
from shardopt.estimate import Setup, estimate
from shardopt.sharding.deepspeed.engine import opened


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "bits", "zero_offload"), [(1, None, "none"), (2, None, "optimizer"), (2, 24, "none"), (3, None, "none")]
)
def test_as_a_real_run(stage: int, bits: int | None, zero_offload: str) -> None:
    options: dict[str, Any] = {} if bits is None else {"master_weight_bits": bits}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3, **options}},
        "zero_optimization": {"stage": stage, **(OFFLOAD if zero_offload == "optimizer" else {})},
        "bf16": {"enabled": True} if bits is None else WITHOUT_MASTERS,
    }
    engine = make_engine(Layers() if bits is None else Layers().bfloat16(), settings)
    engine.backward(engine(TOKENS))
    engine.step()
    expected = estimate(
        estimated_model(), Setup(backend=f"zero{stage}", world_size=2, zero_offload=zero_offload, options=options)
    )
    with opened(engine) as (_, optimizer):  # ZeRO 3 hides the masters from it otherwise
        found = both(shardopt.memory_report(optimizer))
    flats = sum(flat.numel() * flat.element_size() for flat, _ in masters(engine))
    wanted = both(expected)
    if bits is None:
        found["master_weights"] = flats
    else:
        assert flats == pytest.approx(wanted["gradients"], rel=0.01), "masters are the bf16 parameters"
    kinds = ("state", "scales", "master_weights")
    assert_near({kind: found[kind] for kind in kinds}, {kind: wanted[kind] for kind in kinds})
    on_host = expected.device.state == 0
    assert on_host == (zero_offload == "optimizer")
    assert expected.device.parameters == 2 * estimated_model().numel // (2 if stage == 3 else 1)
