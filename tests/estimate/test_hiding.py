"""Whether the CPU's step hides beside the GPU's work: by arithmetic written out here, and by committed results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from ranks.offload import offload_from_cpu
from ranks.shaped import Shaped, small_model
from shardopt.__main__ import main
from shardopt.estimate import Model, Setup, estimate
from shardopt.estimate.hiding import Machine, hiding
from shardopt.estimate.table import Row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SAPPHIRE_RAPIDS = "intel-sapphire-rapids-2-cores.json"
MODEL = Model.of_size(str(2**32))
N = 2**32
STATE = 3 + 3 * 4 / 128  # bytes per parameter: two codes, a master's low byte, three scales per block of 128
ROUND = Machine(gpu_tflops=100, link_gbps=20, host_gbps=50, host_cores=10, core_ns=1, tokens=1000)
OFFLOAD: Mapping[str, Any] = {"offload": "step", "master_weight_bits": 24}


def offloaded(*, options: Mapping[str, Any] = OFFLOAD, **setup: Any) -> Setup:
    return Setup(release_gradients=True, options=options, **setup)


def cells(benchmark: str, column: str) -> dict[str, Any]:
    """A column of a committed result, by the names of the rows."""
    table = json.loads((RESULTS / benchmark / SAPPHIRE_RAPIDS).read_text())
    index = [entry["name"] for entry in table["columns"]].index(column)
    return {row[0]: row[index] for row in table["rows"]}


def test_defaults_are_of_committed_results() -> None:
    first, second = cells("step_cpu_in_cache", "ns per parameter")["bfloat16, log8 + 24 bits"]
    assert Machine().core_ns == pytest.approx((first + second) / 2)


def test_the_host_is_not_taken_for_faster_than_it_was_seen() -> None:
    """Two cores at the rate of a bare loop over memory: the estimate is 1.3 times the measured step, as it says."""
    rate = 16.2 / cells("step_cpu", "ns per parameter")["memory, 16.2 bytes"]
    machine = Machine(host_cores=2, host_gbps=rate)
    measured = cells("step_cpu_bfloat16", "ns per parameter")["shardopt log8 + 24 bits"]
    assert machine.step_seconds(1, 2 + 2 * (2 + STATE)) / measured * 1e9 == pytest.approx(1.3, abs=0.01)


def test_beside_the_next_forward_pass() -> None:
    setup = offloaded(overlap_forward=True, waiting_gradients=8)
    found = hiding(N, estimate(MODEL, setup), setup, ROUND)
    backward, forward = found.windows
    assert forward.gpu == pytest.approx(2 * N * 1000 / 100e12)
    assert backward.gpu == 2 * forward.gpu
    assert backward.link == forward.link == pytest.approx(2 * N / 20e9)
    assert backward.host == pytest.approx(N * 0.19e-9 / 10 + (2 + 2) * N / 50e9)
    assert forward.host == pytest.approx(N * 1e-9 / 10 + N * (2 + 2 * (2 + STATE)) / 50e9, rel=1e-6)
    assert found.bound_by == "host"
    assert found.hidden == pytest.approx(forward.gpu / forward.host)
    assert found.ns_per_parameter == pytest.approx(forward.host / N * 1e9)


def test_several_micro_batches_are_added_up_on_the_host() -> None:
    setup = offloaded(overlap_forward=True)
    one, four = (hiding(N, estimate(MODEL, taken), taken, ROUND) for taken in (setup, replace(setup, micro_batches=4)))
    assert four.windows[0].host - one.windows[0].host == pytest.approx(8 * N / 50e9)
    assert four.windows[1].host - one.windows[1].host == pytest.approx(2 * N / 50e9)
    assert [window.gpu for window in one.windows] == [window.gpu for window in four.windows], "of one micro-batch"


def test_beside_the_backward_pass_and_beside_nothing() -> None:
    released = offloaded()
    found = hiding(N, estimate(MODEL, released), released, ROUND)
    (window,) = found.windows
    assert (window.gpu, window.link) == (pytest.approx(4 * N * 1000 / 100e12), pytest.approx(4 * N / 20e9))
    blocking = replace(released, release_gradients=False)
    exposed = hiding(N, estimate(MODEL, blocking), blocking, ROUND)
    assert exposed.windows[0][1:] == (0.0, window.link, window.host)
    assert (exposed.hidden, exposed.tokens) == (0.0, None)


@pytest.mark.parametrize(
    ("machine", "bound_by"),
    [({"tokens": 100_000}, "GPU"), ({"link_gbps": 1}, "link"), ({"host_cores": 1}, "host")],
)
def test_what_binds(machine: dict[str, Any], bound_by: str) -> None:
    setup = offloaded(overlap_forward=True)
    found = hiding(N, estimate(MODEL, setup), setup, replace(ROUND, **machine))
    assert found.bound_by == bound_by
    assert (found.hidden == 1) == (bound_by == "GPU")


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_tokens_from_which_on_all_hides(overlap_forward: bool) -> None:
    setup = offloaded(overlap_forward=overlap_forward)
    report = estimate(MODEL, setup)
    tokens = hiding(N, report, setup, ROUND).tokens
    assert tokens is not None
    assert hiding(N, report, setup, replace(ROUND, tokens=tokens)).hidden == 1
    assert hiding(N, report, setup, replace(ROUND, tokens=tokens - 1)).hidden < 1


def test_ranks_share_their_host() -> None:
    """A rank's step takes as long as the whole model's on a host that has all of its ranks."""
    setup = offloaded(overlap_forward=True, backend="fsdp2", world_size=16, gpus_per_node=8)
    found = hiding(N, estimate(MODEL, setup), setup, ROUND)
    alone = replace(setup, world_size=1)
    whole = hiding(N, estimate(MODEL, alone), alone, ROUND)
    assert found.windows[1].gpu == whole.windows[1].gpu
    assert found.windows[1].host == pytest.approx(whole.windows[1].host / 2, rel=1e-3), "two hosts"
    assert found.windows[1].link == pytest.approx(whole.windows[1].link / 16, rel=1e-3)


def test_state_that_stays_is_not_stepped_by_the_host() -> None:
    half = round(STATE * N / 2)
    setup = offloaded(options={**OFFLOAD, "device_state_budget": half})
    whole, rest = (hiding(N, estimate(MODEL, s), s, ROUND).windows[0] for s in (offloaded(), setup))
    assert rest.host == pytest.approx(whole.host / 2, rel=0.02)
    assert rest.link == pytest.approx(whole.link / 2, rel=0.02)
    everything = offloaded(options={**OFFLOAD, "device_state_budget": "1000GiB"})
    assert Row("all stays", MODEL, everything).hiding is None


def test_gradients_on_device_and_host() -> None:
    largest = 2 * MODEL.largest
    pieces = 2 * 32 * 2**20
    for micro_batches, on_host in ((None, 2 * N), (1, 2 * N), (4, 4 * N + pieces)):
        report = estimate(MODEL, offloaded(overlap_forward=True, waiting_gradients=8, micro_batches=micro_batches))
        assert report.host.gradients == on_host
        assert report.device.gradients == 9 * largest
        assert report.device.total <= 2.1 * N + 9 * largest
    for setup in (
        offloaded(micro_batches=2),
        replace(offloaded(overlap_forward=True), options={}),
        replace(offloaded(micro_batches=2), options={}),
    ):
        report = estimate(MODEL, setup)
        assert (report.device.gradients, report.host.gradients) == (2 * N, 0)
    assert estimate(MODEL, offloaded(micro_batches=1)).device.gradients == 5 * largest


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_host_gradients_of_a_real_run(micro_batches: int) -> None:
    model = small_model()
    setup = offloaded(overlap_forward=True, micro_batches=micro_batches)
    net = Shaped(model).to(torch.bfloat16)
    with offload_from_cpu(1 << 17):
        optimizer = shardopt.AdamW8bit(net.parameters(), **setup.options)
        with shardopt.release_gradients(net, optimizer, overlap_forward=True, micro_batches=micro_batches):
            for _ in range(micro_batches):
                net(torch.zeros(())).backward()
            optimizer.step()
            optimizer.synchronize()
            expected, report = estimate(model, setup), shardopt.memory_report(optimizer)
    assert report.host.gradients == expected.host.gradients
    assert report.host.state == expected.host.state


def test_row(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", str(N), "--offload", "step", "--release-gradients", "--overlap-forward", "--tokens", "4096"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "micro-batches of 4096 tokens" in printed
    assert "bound by: host; hidden: 28% of the host's step" in printed
    assert main([*command, "--micro-batches", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["offload_step"] is None for row in rows[:5])
    found = rows[5]["offload_step"]
    assert rows[5]["name"] == "adamw8bit bf16 released overlap_forward micro_batches=2 offload=step single"
    assert found["bound_by"] == "host"
    assert found["machine"]["tokens"] == 4096
    assert list(found["seconds"]) == ["backward pass", "next forward pass"]
    assert found["hidden"] == pytest.approx(
        found["seconds"]["next forward pass"]["gpu"] / found["seconds"]["next forward pass"]["host"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overlap-forward"], "overlap_forward: got True without release_gradients"),
        (["--tokens", "0"], "tokens: got 0, expected a number above 0"),
        (["--gpu-tflops", "nan"], "gpu_tflops: got nan, expected a number above 0"),
        (["--host-cores", "2.5"], "invalid int value: '2.5'"),
        (["--release-gradients", "--micro-batches", "0"], "micro_batches: got 0 on 1 ranks, expected at least 1"),
        (
            ["--micro-batches", "3", "--backend", "ddp", "--world-size", "2"],
            "micro_batches: got 3 on 2 ranks, expected a multiple of 2",
        ),
        (["--micro-batches", "2", "--backend", "zero2"], "micro_batches: got 2 with zero2"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "7B", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())
