"""The schedule of offloaded steps: shardopt's scheduler on a stand-in for a GPU, in virtual time."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest

import offload_schedule
from offload_schedule import CHUNK_BYTES, SCALE, Case, Decoder, Found, Model, train
from shardopt.estimate import Setup, estimate
from shardopt.estimate.hiding import Machine, hiding
from shardopt.estimate.model import Model as Shapes
from shardopt.release.forward_overlap import ForwardOverlap
from stand_in_device import CPU, GPU, LANES, TO_GPU, TO_HOST, Clock, Device

DECODER = Decoder(width=4096, layers=8, inner=11008, key_value=1024, vocabulary=8192)
MACHINE = Machine(gpu_tflops=80, link_gbps=25, host_gbps=65, host_cores=16, core_ns=1.11, tokens=16384)
CASE = Case(DECODER, MACHINE)


@pytest.fixture(scope="module")
def found() -> Found:
    return train(CASE)


def test_the_clock_runs_one_thread_at_a_time() -> None:
    """Threads go on in the order of their times, and a condition is seen at the time at which it begins to hold."""
    clock, seen, done = Clock(), list[tuple[str, float]](), list[str]()
    joined = threading.Event()

    def other() -> None:
        clock.join(lambda: True, joined)
        for _ in range(3):
            clock.until(at=clock.now + 2)
            seen.append(("other", clock.now))
        done.append("other")
        clock.leave()

    thread = threading.Thread(target=other)
    thread.start()
    joined.wait()
    for _ in range(2):
        clock.until(at=clock.now + 1.5)
        seen.append(("main", clock.now))
    clock.until(lambda: bool(done))
    seen.append(("main", clock.now))
    thread.join()
    assert seen == [("main", 1.5), ("other", 2), ("main", 3), ("other", 4), ("other", 6), ("main", 6)]
    with pytest.raises(RuntimeError, match="all wait for each other"):
        clock.until()


def test_the_same_in_every_run(found: Found) -> None:
    again = train(CASE)
    assert again == found


def test_lanes_do_one_thing_at_a_time(found: Found) -> None:
    for lane in LANES:
        of_lane = sorted((each for each in found.intervals if each.lane == lane), key=lambda each: each.begin)
        assert of_lane
        assert all(before.end <= after.begin + 1e-12 for before, after in pairwise(of_lane))


def test_every_byte_moves_and_every_parameter_is_stepped(found: Found) -> None:
    """Gradients and weights to the host, weights back; seconds are those of the model of the machine."""
    weights = MACHINE.link_seconds(2 * found.numel)
    assert found.busy(TO_HOST, "gradients") == pytest.approx(weights)
    assert found.busy(TO_HOST, "weights") == pytest.approx(weights)
    assert found.busy(TO_GPU, "weights") == pytest.approx(weights)
    stepped = found.numel * offload_schedule.STEP_BYTES
    assert found.busy(CPU, "step") == pytest.approx(MACHINE.step_seconds(found.numel, stepped))
    assert found.busy(CPU, "norm") == pytest.approx(MACHINE.norm_seconds(found.numel, 2 * found.numel))
    embedding = DECODER.vocabulary * DECODER.width
    computed = (found.numel - embedding) * 6 * MACHINE.tokens / (MACHINE.gpu_tflops * 1e12)
    assert found.gpu == pytest.approx(computed)
    assert found.numel == DECODER.layers * sum(map(math.prod, DECODER.layer())) + 2 * embedding


def test_gradients_at_once(found: Found) -> None:
    """At most waiting_gradients live besides the one that the backward pass adds."""
    for waiting in (1, 8):
        most = (found if waiting == 8 else train(CASE, waiting=waiting)).gradient_bytes
        assert 0 < most <= offload_schedule.gradients_at_once(CASE, waiting + 1)


def test_steps_hide_beside_enough_tokens(found: Found) -> None:
    assert found.hidden > 0.8
    fewer = train(replace(CASE, machine=replace(MACHINE, tokens=4096)))
    assert fewer.hidden < 0.5
    assert fewer.waits_for_step > found.waits_for_step


def test_the_estimate_agrees() -> None:
    """The estimate's share is an upper bound, which the schedule comes near to with small chunks and many layers.

    The first layer's steps hide in nothing, as the embedding's.
    """
    for tokens in (4096, 8192):
        case = Case(replace(DECODER, layers=16), replace(MACHINE, tokens=tokens))
        found = train(case, chunk_bytes=CHUNK_BYTES // 4)
        setup = Setup(
            release_gradients=True, overlap_forward=True, options={"offload": "step", "master_weight_bits": 24}
        )
        shapes = Shapes.of_size(str(found.numel))
        expected = hiding(shapes.numel, estimate(shapes, setup), setup, case.machine).hidden
        assert expected - 0.2 < found.hidden <= expected


def test_weights_come_before_the_last_ones_are_back(found: Found) -> None:
    """A parameter's first chunk is fetched as soon as the one before is stepped, though its way back takes a while."""
    there, back = (
        sorted(
            (each for each in found.intervals if (each.lane, each.name) == (lane, "weights")),
            key=lambda each: each.begin,
        )
        for lane in (TO_HOST, TO_GPU)
    )
    assert len(there) == len(back)
    assert all(fetched.begin < before.end for fetched, before in zip(there[1:], back, strict=False))


def test_steps_that_end_while_others_are_submitted() -> None:
    """Small parameters are stepped faster than ``optimizer.step()`` hands them over."""
    small = train(Case(Decoder(width=128, layers=4, inner=256, key_value=128, vocabulary=256), MACHINE))
    embedding, head = 256 * 128, 256 * 128
    assert small.numel == 4 * (4 * 128 * 128 + 3 * 256 * 128) + embedding + head
    assert len([each for each in small.intervals if (each.lane, each.name) == (CPU, "step")]) == 4 * 7 + 2


def test_a_head_that_is_waited_for_first_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the schedule shows that all steps are over before the first layer runs."""
    end = ForwardOverlap.end

    def forgetful(overlap: ForwardOverlap, *args: object) -> None:
        end(overlap, *args)  # type: ignore[arg-type]
        overlap._called = set()

    monkeypatch.setattr(ForwardOverlap, "end", forgetful)
    assert train(CASE).hidden < 0


def test_micro_batches(found: Found) -> None:
    """Sums take the CPU's time beside each pass; the step is taken once, beside the first of the next passes."""
    several = train(CASE, micro_batches=3)
    assert several.gpu == pytest.approx(3 * found.gpu)
    assert several.busy(TO_HOST, "gradients") == pytest.approx(3 * found.busy(TO_HOST, "gradients"))
    assert several.busy(CPU, "sum") == pytest.approx(3 * MACHINE.memory_seconds(10 * found.numel))
    assert several.busy(CPU, "step") == pytest.approx(
        MACHINE.step_seconds(found.numel, (offload_schedule.STEP_BYTES + 2) * found.numel)
    )
    assert several.hidden > 0.75


def test_ranks_hold_their_rows() -> None:
    shared = Model(replace(CASE, ranks=2), Device(MACHINE, SCALE, 1.0, 2))
    whole = Model(CASE, Device(MACHINE, SCALE, 1.0, 1))
    halves, all_rows = (sum(param.numel() for param in model.parameters()) for model in (shared, whole))
    assert 2 * halves == all_rows


def test_merged_intervals(found: Found) -> None:
    merged = list(offload_schedule.merged(found.intervals, found.seconds / 300))
    assert 4 < len(merged) < len(found.intervals) / 3
    assert {each.lane for each in merged} == set(LANES)
    assert [each.name for each in merged if each.lane == GPU][-1] == "backward"


def test_the_script_reports_a_tiny_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the script from end to end; a thread stands in for its process, which would import PyTorch anew."""
    monkeypatch.setattr(offload_schedule, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    case = Case(Decoder(width=256, layers=4, inner=512, key_value=256, vocabulary=512), MACHINE)
    monkeypatch.setattr(offload_schedule, "CASES", {"tiny": case})
    monkeypatch.setattr("sys.argv", ["offload_schedule.py", "--tokens", "4096"])
    offload_schedule.main()
    printed = capsys.readouterr().out
    assert "tiny: hidden, of the CPU's step," in printed
    assert "A step of tiny: what runs when" in printed
