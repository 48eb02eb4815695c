"""The CUDA kernels equal the CPU's bit for bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import Parameter

import message_problem
from cuda_device import CUDA, needs_gpu
from helpers import CODEC_NAMES, EIGHT_BIT, RULES, Named, step
from kernel_problem import CPU, DTYPES, HUGE, clipped, gradients, make, run, start
from ranks.layouts import values
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.kernels.dispatch_cuda import make_call
from step_tables import FORMATS, HYPER, PIECES, ROWS, Problem
from weight_formats import FP32

SHAPES = ((), (1,), (31,), (257,), (4097,), (0, 64), (97, 130), (70, 33), (1, 4099), (3, 257), (9, 512), (4, 5, 7, 3))


def assert_equal_on_both(rule: str, codec: str, initial: Named, steps: list[Named], **options: object) -> None:
    wanted, skipped = run(rule, codec, initial, steps, **options)
    actual, found_skipped = run(rule, codec, initial, steps, CUDA, **options)
    assert_same(actual, wanted)
    assert found_skipped == skipped


@pytest.mark.parametrize(("rule", "codec", "dtypes"), [*product(RULES, CODEC_NAMES, DTYPES)])
def test_equal_the_cpu(rule: str, codec: str, dtypes: str) -> None:
    """Shows that steps give the CPU's bits, with gradients among them that are skipped, or near the largest float."""
    param_dtype, gradient_dtype = DTYPES[dtypes]
    huge = {name: gradient.clone() for name, gradient in gradients(2, gradient_dtype, SHAPES).items()}
    for gradient in huge.values():
        for at, value in HUGE.items():
            if at < gradient.numel():
                gradient.view(-1)[at] = value
    steps = [huge if t == 5 else gradients(t, gradient_dtype, SHAPES) for t in (1, 2, 3, 4, 5, 6)]
    assert_equal_on_both(rule, codec, start(param_dtype, SHAPES), steps)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("codec", EIGHT_BIT)
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
def test_block_sizes(rule: str, codec: str, block_size: int) -> None:
    """Shows that every block size gives the CPU's bits."""
    shapes = ((2, 5000), (97, 33), (3, 257), (2, 4096), (2, 4097))
    steps = [gradients(t, FP32, shapes) for t in (1, 3, 4)]
    assert_equal_on_both(rule, codec, start(FP32, shapes), steps, block_size=block_size)


@pytest.mark.parametrize(("rule", "codec", "weights"), [*product(HYPER, CODEC_NAMES, FORMATS)])
def test_weight_formats_and_cut_blocks(rule: str, codec: str, weights: str) -> None:
    """Shows that whole rows, pieces and cut blocks, at any address, give the CPU's bits; no other byte is written."""
    for piece in (*PIECES.values(), *ROWS.values()):
        for block_size in filter(piece.is_in_blocks, (32, 128, 512)):
            cpu, cuda = (Problem(rule, codec, weights, piece, block_size, device) for device in (CPU, CUDA))
            wanted, skipped = (problem.run(make_call, steps=4) for problem in (cpu, cuda))
            assert_same(cuda.snapshot(), cpu.snapshot())
            cuda.assert_nothing_written_around()
            assert skipped == wanted > 0, (piece, block_size)


@needs_gpu
def test_many_staged_rows() -> None:
    """Shows that staged rows of several tasks an entry, and several entries a launch, give the CPU's bits."""
    shapes = ((3001, 130), (1999, 257), (9001, 33), (777, 1000), (65, 2377), (1_000_003,))
    steps = [gradients(t, torch.bfloat16, shapes) for t in (1, 2, 4, 5)]
    assert_equal_on_both("adamw", "log8", start(torch.bfloat16, shapes), steps)


@pytest.mark.parametrize("dtype", message_problem.DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    """Shows that norms, clipped gradients and steps that clip have the CPU's bits, finite or not."""
    for numel in (2, 1030, 3_000_000)[: 3 if CUDA.type == "cuda" else 2]:
        for name, floats in message_problem.numbers(dtype, numel, numel):
            given = [floats, floats[1 : numel // 2], floats.view(-1, 2).t()]
            wanted, actual = (clipped([x.to(device) for x in given]) for device in (CPU, CUDA))
            for one, expected in zip(actual, wanted, strict=True):
                torch.testing.assert_close(one.cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_mixed_codecs_and_rules_in_one_step() -> None:
    """Shows that one step over groups of different codecs and options gives the CPU's bits."""

    def stepped(device: torch.device) -> Snapshot:
        initial = start(torch.bfloat16, SHAPES)
        params = {name: Parameter(value.to(device, copy=True)) for name, value in initial.items()}
        groups = [
            {"params": [param], "codec": CODEC_NAMES[i % len(CODEC_NAMES)], "momentum": 0.9 * (i % 3 > 0)}
            for i, param in enumerate(params.values())
        ]
        optimizer = RULES["momentum"].make(groups, min_quantized_numel=64)
        for t in (1, 2, 3):
            step(optimizer, params, gradients(t, torch.bfloat16, SHAPES))
        return snapshot(params, optimizer)

    assert_same(stepped(CUDA), stepped(CPU))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_state_moves_between_devices(codec: str) -> None:
    """Shows that a state that goes to and fro between devices goes on with the CPU's bits."""
    shapes = ((97, 130), (257,))
    steps = [gradients(t, FP32, shapes) for t in (1, 2, 4, 5)]
    wanted, _ = run("adamw", codec, start(FP32, shapes), steps)
    params, optimizer = make("adamw", codec, start(FP32, shapes))
    for gradient, device in zip(steps, (CUDA, CPU, CUDA, CPU), strict=True):
        params, new = make("adamw", codec, {name: param.detach().to(device) for name, param in params.items()})
        new.load_state_dict(optimizer.state_dict())
        step(new, params, gradient)
        optimizer = new
    assert_same(snapshot(params, optimizer), wanted)


@needs_gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Shows that offsets beyond 31 bits are right: all rows are alike, and stay so."""
    rows, cols = 2**21 + 3, 1024
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory on the device")
    row = values((1, cols), 0, torch.bfloat16)
    gradient = (values((1, cols), 1) * 1e-2).to(torch.bfloat16)
    wanted, _ = run("adamw", "log8", {"": row}, [{"": gradient}] * 2)
    param = Parameter(row.to(CUDA).expand(rows, cols).contiguous())
    optimizer = RULES["adamw"].make([param])
    param.grad = gradient.to(CUDA).expand(rows, cols).contiguous()
    optimizer.step()
    optimizer.step()
    actual = {"": param.detach(), **{f"/{name}": value for name, value in optimizer.state[param].items()}}
    for name, value in actual.items():
        if name != "/step":
            first = wanted[name][0].to(CUDA)
            assert all(bool((part == first).all()) for part in value.split(2**16)), name
