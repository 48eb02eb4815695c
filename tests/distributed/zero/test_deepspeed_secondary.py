"""ZeRO 3 with zero_hpz_partition_size: a node's second copies of parameters, which loading a checkpoint makes old."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardopt
from ranks.deepspeed import config, make_engine, model_parameters
from ranks.models import loss_of, make_batch, make_frozen
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same

#: Gives each layer's parameters up as soon as it is done: the backward pass gathers them anew, of the second copies.
AT_ONCE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}


def _train(engine: Any, first: int, steps: int) -> list[torch.Tensor]:
    """The losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, make_batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def _goes_on(path: Path, per_node: int, seed: int) -> Snapshot:
    """Result of an engine after it saved a checkpoint, or loaded it.

    Args:
        path: of the checkpoint.
        per_node: ranks that hold the parameters a second time, in parts; 1 for none.
        seed: of the model; 0 saves, others load.
    """
    zero = {**AT_ONCE, "zero_hpz_partition_size": per_node}
    engine = make_engine(make_frozen(seed), config(3, zero=zero), model_parameters=None)
    _train(engine, 10 * seed, 2)
    with torch.no_grad():
        loss_of(engine, make_batch(99))  # not followed by a step, which would forget the second copies
    held = [param.ds_secondary_tensor for param in engine.module.parameters()]
    assert all((second is not None) == (per_node > 1) for second in held)
    (shardopt.checkpoint.load if seed else shardopt.checkpoint.save)(path, engine)
    found: Snapshot = {f"loaded {name}": param for name, param in model_parameters(engine).items()}
    with torch.no_grad():
        found["evaluated"] = loss_of(engine, make_batch(98))
    found["losses"] = torch.stack(_train(engine, 2, 3))
    return found | model_parameters(engine)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_loaded_checkpoint(tmp_path: Path) -> None:
    pool = (
        Pool()
    )  # of its own: DeepSpeed keeps the nodes' process groups for good, and uses them whatever a config says
    try:
        expected = pool.run(4, _goes_on, tmp_path, 1, 0)
        for own, actual in zip(expected, pool.run(4, _goes_on, tmp_path, 2, 1), strict=True):
            assert_same(actual, own)
    finally:
        pool.close()
