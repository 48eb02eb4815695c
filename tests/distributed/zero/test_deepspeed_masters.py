"""DeepSpeed's masters that are the parameters themselves: bf16 without float32 masters, and the memory that saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ranks.deepspeed import (
    ALL_OFFLOAD,
    OFFLOAD,
    PINNED,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    config,
    engine_snapshot,
    goes_on_as_whole,
    masters,
    model_parameters,
    stepped_engine,
    twins,
)
from ranks.snapshot import Snapshot, assert_same
from shardopt.sharding.deepspeed import hooks
from slow_cases import slow

#: Where masters live, at its worst.
ZERO: list[tuple[int, dict[str, Any]]] = [
    (1, ROUND_ROBIN),
    (2, ROUND_ROBIN),
    (3, SUB_GROUPS),
    (1, {**OFFLOAD, **ROUND_ROBIN}),
    (2, {**PINNED, **ROUND_ROBIN}),
    (3, {**PINNED, **SUB_GROUPS}),
    (3, {**ALL_OFFLOAD, **SUB_GROUPS}),
]


def _config(stage: int, zero: dict[str, Any], **options: Any) -> dict[str, Any]:
    return config(stage, zero=zero, params={"master_weight_bits": 24}, bf16=WITHOUT_MASTERS, **options)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [(2, {}), ZERO[2], ZERO[6]])
def test_deepspeed_reads_masters(stage: int, zero: dict[str, Any]) -> None:
    """DeepSpeed's way from a parameter to the master leads to the memory that is stepped."""
    settings = _config(stage, zero)
    from deepspeed.utils import safe_get_full_fp32_param

    engine = stepped_engine(settings, STEPS)
    read = {name: safe_get_full_fp32_param(param).float() for name, param in engine.module.named_parameters()}
    assert_same(read, {name: param.float() for name, param in model_parameters(engine).items()})


@contextmanager
def _apart() -> Iterator[None]:
    """Engines made inside keep all the copies that DeepSpeed makes."""
    share, hooks.share_copies = hooks.share_copies, lambda wrapper: None
    try:
        yield
    finally:
        hooks.share_copies = share


def _both(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Two engines alike after some steps, the second with everything apart."""
    one = stepped_engine(settings, STEPS)
    with _apart():
        other = stepped_engine(settings, STEPS)
    assert [flat.shape for flat, _ in masters(one)] == [flat.shape for flat, _ in masters(other)]
    return one, other


def _all(engine: Any) -> Snapshot:
    return {**engine_snapshot(engine), **{f"model.{k}": v for k, v in model_parameters(engine).items()}}


def _sizes(engine: Any) -> dict[int, int]:
    """The bytes of each piece of memory that parameters, masters, gradients and staging buffers stand in."""
    wrapper = engine.optimizer
    tensors = [flat for flat, _ in masters(engine)]
    tensors += [flat.grad for flat, _ in masters(engine) if flat.grad is not None]
    tensors += [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
    tensors += getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    tensors += [x for x in [getattr(wrapper, "grad_partitions_flat_buffer", None)] if x is not None]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "saved"),
    [
        (1, {}, 2),  # masters
        (*ZERO[1], 2),
        (*ZERO[2], 2),
        (1, OFFLOAD, 2),  # staging
        (*ZERO[4], 2),
        (*ZERO[5], 2),  # gradients
        (*ZERO[6], 4),  # both
        (*ZERO[2], None),  # with float32 masters
        *slow((*case, None) for case in ZERO if case is not ZERO[2]),
    ],
)
def test_shared_is_as_apart(stage: int, zero: dict[str, Any], saved: int | None) -> None:
    """And saves so many bytes per parameter that a rank owns."""
    options = {"gradient_clipping": 0.1, "gradient_accumulation_steps": 2}
    one, other = _both((config if saved is None else _config)(stage, zero=zero, **options))
    assert_same(_all(one), _all(other))
    fewer = sum(_sizes(other).values()) - sum(_sizes(one).values())
    assert fewer > 0
    owned = sum(flat.numel() for flat, _ in masters(one))
    assert saved is None or fewer == saved * owned


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_native_pinning_shares_nothing_offloaded(stage: int) -> None:
    """DeepSpeed's own pinning would free shared memory twice, so the tensors stay apart."""
    settings = _config(stage, OFFLOAD)
    with pytest.MonkeyPatch.context() as patch:
        one, other = _both(settings)
        assert len(_sizes(one)) < len(_sizes(other))
        wrapper = other.optimizer
        patch.setenv("DS_PIN_MEMORY_BACKEND", "native")
        before = _sizes(other)
        hooks.share_copies(wrapper)
        assert _sizes(other) == before


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [ZERO[0], ZERO[1], ZERO[2]])
def test_masters_that_were_away(tmp_path: Path, stage: int, zero: dict[str, Any]) -> None:
    """Masters are the parameters again, though DeepSpeed brings each back to memory of its own; files are as small."""
    of = twins(_config(stage, zero))
    engine = of.engine(STEPS)
    wrapper, rank = engine.optimizer, dist.get_rank()
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
    dist.barrier()
    files = list(tmp_path.rglob(f"*zero_pp_rank_{rank}_*optim_states.pt"))
    assert len(files) == 1
    owned = sum(flat.numel() for flat, _ in masters(engine))
    state = sum(x.nbytes for s in engine.basic_optimizer.state.values() for x in s.values())
    assert files[0].stat().st_size < 2 * owned + state + 50_000  # its own masters, not everyone's parameters
    other = of.engine(2, seed=1)
    shared = set(_sizes(other))
    assert other.load_checkpoint(str(tmp_path))[0] is not None
    assert set(_sizes(other)) == shared
    for each in (other, engine):
        goes_on_as_whole(each, of)
