"""A training job on two machines, which are network namespaces: it trains, loses one of them, and goes on."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

import network
from network import Node
from ranks.pool import Pool
from train_job import (
    MULTINODE,
    PROGRAMS,
    ROOT,
    TINY,
    assert_same_run,
    run_on,
    steps_saved,
    summary,
    wait_for_checkpoint,
)
from versions import needs_fsdp2_on_the_cpu

pytestmark = needs_fsdp2_on_the_cpu

SMALL = ROOT / "configs" / "small.yaml"  # which torchrun.sh takes
ORDERED = ("--ordered", "--micro-batches", "6", "--clip", "0.2")
#: Endless, as far as the tests go.
LONG = (*TINY, "--clip", "0", "--steps", "100000", "--backend", "fsdp2", "--timeout", "10", "--keep-checkpoints", "0")
#: Seconds in which the other machine has to end: rather more than it takes on a busy machine.
SOON = 60


def start(
    node: Node, nodes: int | str, ranks_per_node: int, *options: object, max_restarts: int = 0
) -> subprocess.Popen[str]:
    """Runs torchrun.sh on a node, as its user would."""
    places = {"NODES": str(nodes), "RANKS_PER_NODE": str(ranks_per_node), "MAX_RESTARTS": str(max_restarts)}
    return node.start(
        ["bash", MULTINODE / "torchrun.sh", *LONG, *options],
        env={
            **os.environ,
            **places,
            "FIRST_NODE": "node1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(autouse=True)
def networks() -> None:
    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)


def test_two_machines_of_which_one_is_lost(ranks: Pool, text: Path, tmp_path: Path) -> None:
    output, whole = tmp_path / "disturbed", tmp_path / "whole"
    job = (*ORDERED, "--data", text, "--output", output)

    with network.two_nodes() as nodes:
        first, _ = agents = [start(node, 2, 1, *job) for node in nodes]
        try:
            wait_for_checkpoint(output, first)
            nodes[1].crash()
            began = time.monotonic()
            said, _ = first.communicate(timeout=SOON)
            assert time.monotonic() - began < SOON
        finally:
            for agent in agents:
                agent.kill()
        assert first.returncode != 0
        assert (
            len([line for line in said.splitlines() if line.startswith("train.py: error: another rank is gone")]) == 1
        )

    # The sums of ordered gradients do not depend on the number of ranks: the machine that is left has one.
    last = steps_saved(output)[-1]
    with network.two_nodes() as (node, _):
        alone = start(node, 1, 1, *job, "--stop-at-step", last + 4)
        said, _ = alone.communicate(timeout=240)
    assert alone.returncode == 0, said
    found = summary(output)["verified"]
    assert found["codes"] == found["scales"] > 0

    whole_job = ("--config", SMALL, *LONG, *ORDERED, "--data", text, "--output", whole)
    run_on(ranks, 2, *whole_job, "--stop-at-step", last + 4)
    assert steps_saved(output) == list(range(4, last + 5, 4))
    assert_same_run(output, whole, steps_saved(output))


@pytest.mark.slow
def test_the_machine_that_is_left_goes_on_by_itself(text: Path, tmp_path: Path) -> None:
    """torchrun waits half a minute for another machine, and then starts without."""
    output = tmp_path / "output"
    job = ("--data", text, "--output", output, "--checkpoint-interval", 50, "--stop-at-step", 400)
    with network.two_nodes() as nodes:
        first, _ = (start(node, "1:2", 1, *job, max_restarts=3) for node in nodes)
        wait_for_checkpoint(output, first)
        nodes[1].crash()
        said, _ = first.communicate(timeout=240)
    assert first.returncode == 0, said
    found = summary(output)
    assert (found["world_size"], found["verified"]["world_size"]) == (1, 2)
    assert steps_saved(output) == list(range(50, 401, 50))
