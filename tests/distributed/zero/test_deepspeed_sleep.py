"""``engine.offload_states()`` and ``reload_states()``: the bits of a run that never moved anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ranks.deepspeed import (
    BF16,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    config,
    goes_on_as_whole,
    masters,
    twins,
)
from ranks.offload import offload_from_cpu
from slow_cases import slow

#: Every stage whose states DeepSpeed moves, with float32 and bf16 models, and masters that are the parameters.
CASES = [
    (stage, zero, sections)
    for stage, zero in ((1, ROUND_ROBIN), (2, {}), (3, SUB_GROUPS))
    for sections in ({}, BF16, {"bf16": WITHOUT_MASTERS, "params": {"master_weight_bits": 24}})
]
MOVES = [(*case, what) for case in CASES for what in ("everything", "optim_states")]
#: Everything in each case, the optimizer's states alone in each stage and with each model.
FEW_MOVES = [move for place, move in enumerate(MOVES) if move[3] == "everything" or place // 2 % 4 == 0]


def _addresses(engine: Any) -> set[int]:
    states = engine.basic_optimizer.state.values()
    return {x.data_ptr() for state in states for key, x in state.items() if key != "step" and x.numel()}


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero", "sections", "what"), [*FEW_MOVES, *slow(MOVES, besides=FEW_MOVES)])
def test_states_go_and_come_back(stage: int, zero: dict[str, Any], sections: dict[str, Any], what: str) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    of = twins(config(stage, zero=zero, **sections))
    include = None if what == "everything" else [OffloadStateTypeEnum.optim_states]
    with offload_from_cpu():
        engine = of.engine(STEPS)
        before = _addresses(engine)
        for _ in range(2):
            engine.offload_states(include=include, pin_memory=False)
            if stage == 3:  # the others move by DeepSpeed's own copies, of which there are none on the CPU
                assert before.isdisjoint(_addresses(engine))
            engine.reload_states()
        assert all("buffer" not in key for state in engine.basic_optimizer.state.values() for key in state)
        goes_on_as_whole(engine, of)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero", "sections"), [case for case in CASES if "params" in case[2]])
def test_masters_that_are_the_parameters_are_so_again(
    tmp_path: Path, stage: int, zero: dict[str, Any], sections: dict[str, Any]
) -> None:
    """DeepSpeed brings each back to memory of its own. The engine's checkpoints are as small as before."""
    of = twins(config(stage, zero=zero, **sections))
    engine = of.engine(STEPS)
    wrapper = engine.optimizer
    rank = dist.get_rank()
    for _ in range(2):
        engine.offload_states()  # with buffers of its own even on the CPU
        engine.reload_states()
        partitions = (
            wrapper.fp16_partitioned_groups_flat
            if stage == 3
            else [partitions[rank] for partitions in wrapper.parallel_partitioned_bit16_groups]
        )
        addresses = [partition.data_ptr() for partition in partitions]
        assert [flat.data_ptr() for flat, _ in masters(engine)] == addresses
    engine.save_checkpoint(str(tmp_path))
    loaded = of.engine(1, seed=1)
    loaded.load_checkpoint(str(tmp_path))
    goes_on_as_whole(loaded, of)
    goes_on_as_whole(engine, of)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_own_methods(stage: int) -> None:
    """Under ZeRO 3, too, which shows the optimizer no parameters between steps."""
    of = twins(config(stage))
    with offload_from_cpu():
        engine = of.engine(STEPS)
        before = _addresses(engine)
        engine.basic_optimizer.offload()
        assert before.isdisjoint(_addresses(engine))
        goes_on_as_whole(engine, of)
        engine.basic_optimizer.reset_state()
        assert not engine.basic_optimizer.state
