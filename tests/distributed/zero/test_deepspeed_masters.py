"""DeepSpeed's masters that are the parameters themselves: bf16 without float32 masters, and the memory that saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ranks.deepspeed import (
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    config,
    engine_snapshot,
    goes_on_as_whole,
    load_portable,
    masters,
    model_parameters,
    runs_as_whole,
    save_own,
    save_portable,
    stepped_engine,
    twins,
)
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same
from shardopt.sharding.deepspeed import hooks

PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
ALL_OFFLOAD = {**OFFLOAD, "offload_param": {"device": "cpu"}}
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


def _config(stage: int, zero: dict[str, Any], bits: int = 24, **options: Any) -> dict[str, Any]:
    params = {"master_weight_bits": bits, **options.pop("params", {})}
    return config(stage, zero=zero, params=params, bf16=WITHOUT_MASTERS, **options)


@pytest.mark.parametrize(
    ("stage", "zero", "bits"),
    [
        (1, ROUND_ROBIN, 24),
        (2, ROUND_ROBIN, 32),
        (3, SUB_GROUPS, 24),
        *((*case, 24) for case in ZERO[3:]),
        *(pytest.param(*case, 32, marks=pytest.mark.slow) for case in [ZERO[0], *ZERO[2:]]),
        pytest.param(*ZERO[1], 24, marks=pytest.mark.slow),
    ],
)
def test_bf16_without_masters(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], bits: int) -> None:
    """DeepSpeed hands over bf16 partitions; the state has the bits that a partition lacks of a master."""
    deepspeed_ranks.run(2, runs_as_whole, twins(_config(stage, zero, bits)))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [(2, {}), ZERO[2], ZERO[6]])
def test_deepspeed_reads_masters(stage: int, zero: dict[str, Any]) -> None:
    """DeepSpeed's way from a parameter to the master leads to the memory that is stepped."""
    settings = _config(stage, zero)
    from deepspeed.utils import safe_get_full_fp32_param

    engine = stepped_engine(settings, STEPS)
    read = {name: safe_get_full_fp32_param(param).float() for name, param in engine.module.named_parameters()}
    assert_same(read, {name: param.float() for name, param in model_parameters(engine).items()})


def test_bf16_masters_without_the_flag_of_states(deepspeed_ranks: Pool) -> None:
    """The flag says how DeepSpeed's Adam keeps its moments; the codec says how ours are kept."""
    settings = _config(2, OFFLOAD)
    settings["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    deepspeed_ranks.run(2, runs_as_whole, twins(settings))


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


def _as_apart(settings: dict[str, Any]) -> None:
    one, other = _both(settings)
    assert_same(_all(one), _all(other))
    assert sum(_sizes(one).values()) < sum(_sizes(other).values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_clipping": 0.1}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        {"gradient_clipping": 0.1, "gradient_accumulation_steps": 2},
    ],
)
@pytest.mark.parametrize(("stage", "zero"), [*ZERO[1:3], *ZERO[4:]])
def test_shared_is_as_apart(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, _as_apart, _config(stage, zero, **options))


@pytest.mark.parametrize(
    ("stage", "zero"), [*ZERO[1:3], *(pytest.param(*case, marks=pytest.mark.slow) for case in (ZERO[0], *ZERO[3:]))]
)
def test_float32_is_shared_too(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, _as_apart, config(stage, zero=zero, gradient_clipping=0.1))


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
        (2, ROUND_ROBIN, 2),
        (3, SUB_GROUPS, 2),
        (1, OFFLOAD, 2),  # staging
        (2, PINNED, 2),
        (3, OFFLOAD, 2),  # gradients
        (3, ALL_OFFLOAD, 4),  # both
    ],
)
def test_bytes_saved_per_owned_parameter(stage: int, zero: dict[str, Any], saved: int) -> None:
    settings = _config(stage, zero)
    one, other = _both(settings)
    owned = sum(flat.numel() for flat, _ in masters(one))
    assert sum(_sizes(other).values()) - sum(_sizes(one).values()) == saved * owned


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


def _save_own(settings: dict[str, Any], path: Path) -> None:
    save_own(path, twins(settings))
    dist.barrier()
    files = list(path.rglob(f"*zero_pp_rank_{dist.get_rank()}_*optim_states.pt"))
    assert len(files) == 1
    engine = stepped_engine(settings, STEPS)
    owned = sum(flat.numel() for flat, _ in masters(engine))
    state = sum(x.nbytes for s in engine.basic_optimizer.state.values() for x in s.values())
    assert files[0].stat().st_size < 2 * owned + state + 50_000  # its own masters, not everyone's parameters


def _shares_after_loading(settings: dict[str, Any], path: Path) -> None:
    engine = stepped_engine(settings, 2, seed=1)
    shared = set(_sizes(engine))
    assert engine.load_checkpoint(str(path))[0] is not None
    assert set(_sizes(engine)) == shared
    goes_on_as_whole(engine, twins(settings))


@pytest.mark.parametrize(("stage", "zero"), [*ZERO[1:3], *ZERO[4:]])
def test_own_checkpoint(deepspeed_ranks: Pool, tmp_path: Path, stage: int, zero: dict[str, Any]) -> None:
    settings = _config(stage, zero)
    deepspeed_ranks.run(2, _save_own, settings, tmp_path)
    deepspeed_ranks.run(2, _shares_after_loading, settings, tmp_path)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(1, 2), (4, 6), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(2, 5), (6, 1)])]
)
def test_portable_checkpoint(deepspeed_ranks: Pool, tmp_path: Path, saved: int, loaded: int) -> None:
    """On other numbers of ranks; four of them average exactly, three do not."""
    deepspeed_ranks.run(4, save_portable, tmp_path, twins(_config(*ZERO[saved])))
    deepspeed_ranks.run(2, load_portable, tmp_path, twins(_config(*ZERO[loaded])))
