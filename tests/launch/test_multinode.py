"""A training job on two machines: it trains, loses one of them, and goes on.

Each machine is a torchrun of its own on this one; the loss of it kills all its processes at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ranks.pool import Pool
from train_job import (
    CLEAR,
    MULTINODE,
    PROGRAMS,
    assert_same_run,
    free_port,
    run_on,
    steps_saved,
    summary,
    wait_for_checkpoint,
)
from versions import needs_fsdp2_on_the_cpu

pytestmark = needs_fsdp2_on_the_cpu

ORDERED = ("--ordered", "--micro-batches", "6", "--clip", "0.2")
#: Endless, as far as the tests go.
LONG = (*CLEAR, "--steps", "100000", "--backend", "fsdp2", "--timeout", "10", "--keep-checkpoints", "0")
#: Seconds in which the other machine has to end: rather more than it takes on a busy machine.
SOON = 60


class Machines:
    """Machines that were started, the first of them as the one that torchrun.sh calls FIRST_NODE."""

    def __init__(self) -> None:
        self._agents: list[subprocess.Popen[str]] = []

    def start(self, port: int, nodes: int | str, *options: object, max_restarts: int = 0) -> subprocess.Popen[str]:
        """Runs torchrun.sh as its user would on a machine, and waits until the first one can be reached."""
        places = {"NODES": nodes, "RANKS_PER_NODE": 1, "MAX_RESTARTS": max_restarts, "PORT": port}
        more = {"FIRST_NODE": "localhost", "OMP_NUM_THREADS": "1", "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
        command = ["bash", MULTINODE / "torchrun.sh", *LONG, *options]
        agent = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **{name: str(place) for name, place in places.items()}, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._agents.append(agent)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    return agent
            assert agent.poll() is None
            time.sleep(0.1)

    def crash(self, agent: subprocess.Popen[str]) -> None:
        """Kills an agent and its ranks."""
        if agent.poll() is None:
            ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for pid in (agent.pid, *map(int, ranks)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for agent in self._agents:
            self.crash(agent)
            agent.communicate()


@pytest.fixture
def machines() -> Iterator[Machines]:
    found = Machines()
    yield found
    found.close()


def test_two_machines_of_which_one_is_lost(machines: Machines, ranks: Pool, text: Path, tmp_path: Path) -> None:
    output, whole, port = tmp_path / "disturbed", tmp_path / "whole", free_port()
    job = (*ORDERED, "--data", text, "--output", output)
    first, second = (machines.start(port, 2, *job) for _ in range(2))
    wait_for_checkpoint(output, first)
    machines.crash(second)
    said, _ = first.communicate(timeout=SOON)
    assert first.returncode != 0
    assert len([line for line in said.splitlines() if line.startswith("train.py: error: another rank is gone")]) == 1

    # The sums of ordered gradients do not depend on the number of ranks: the machine that is left has one.
    last = steps_saved(output)[-1]
    alone = machines.start(free_port(), 1, *job, "--stop-at-step", last + 4)
    said, _ = alone.communicate(timeout=240)
    assert alone.returncode == 0, said
    found = summary(output)["verified"]
    assert found["codes"] == found["scales"] > 0

    run_on(ranks, 2, *LONG, *ORDERED, "--data", text, "--output", whole, "--stop-at-step", last + 4)
    assert steps_saved(output) == list(range(4, last + 5, 4))
    assert_same_run(output, whole, steps_saved(output))


@pytest.mark.slow
def test_the_machine_that_is_left_goes_on_by_itself(machines: Machines, text: Path, tmp_path: Path) -> None:
    """torchrun waits half a minute for another machine, and then starts without."""
    output, port = tmp_path / "output", free_port()
    job = ("--data", text, "--output", output, "--checkpoint-interval", 50, "--stop-at-step", 400)
    first, second = (machines.start(port, "1:2", *job, max_restarts=3) for _ in range(2))
    wait_for_checkpoint(output, first)
    machines.crash(second)
    said, _ = first.communicate(timeout=240)
    assert first.returncode == 0, said
    found = summary(output)
    assert (found["world_size"], found["verified"]["world_size"]) == (1, 2)
    assert steps_saved(output) == list(range(50, 401, 50))
