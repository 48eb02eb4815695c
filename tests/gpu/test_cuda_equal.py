"""The CUDA kernels equal the CPU's bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import cuda_emulated
import message_problem
from cuda_device import CPU, CUDA, make_on, needs_gpu, run, snapshot_of, step_on
from helpers import CODEC_NAMES, EIGHT_BIT, RULES, at_odd_offset
from kernel_problem import DTYPES, HUGE, gradients, start
from ranks.layouts import values
from ranks.snapshot import Snapshot, assert_same
from shardopt.codec import CODECS
from shardopt.kernels.devices import make_call
from shardopt.kernels.skipped import SkippedElements
from step_tables import FORMATS, HYPER, PIECES, ROWS, Piece, Problem
from weight_formats import FP32

SHAPES = ((), (1,), (31,), (257,), (4097,), (0, 64), (97, 130), (70, 33), (1, 4099), (3, 257), (9, 512), (4, 5, 7, 3))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_equal_the_cpu(rule: str, codec: str, dtypes: str) -> None:
    """Shows that steps of every rule with every codec give the CPU's bits, with skipped elements among them."""
    param_dtype, gradient_dtype = DTYPES[dtypes]
    steps = [gradients(t, gradient_dtype, SHAPES) for t in (1, 2, 3, 4)]
    wanted, skipped = run(CPU, rule, codec, start(param_dtype, SHAPES), steps)
    actual, found_skipped = run(CUDA, rule, codec, start(param_dtype, SHAPES), steps)
    assert_same(actual, wanted)
    assert found_skipped == skipped > 0


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("codec", EIGHT_BIT)
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
def test_block_sizes(rule: str, codec: str, block_size: int) -> None:
    """Shows that every block size gives the CPU's bits."""
    shapes = ((2, 5000), (97, 33), (3, 257), (2, 4096), (2, 4097))
    steps = [gradients(t, FP32, shapes) for t in (1, 3, 4)]
    wanted, _ = run(CPU, rule, codec, start(FP32, shapes), steps, block_size=block_size)
    actual, _ = run(CUDA, rule, codec, start(FP32, shapes), steps, block_size=block_size)
    assert_same(actual, wanted)


def assert_problem_same(rule: str, codec: str, weights: str, piece: Piece, block_size: int = 128) -> None:
    """Steps a piece on both devices: the same bits, no byte written around it, as many skipped elements."""
    cpu, cuda = (Problem(rule, codec, weights, piece, block_size, device) for device in (CPU, CUDA))
    wanted, skipped = (
        problem.run(lambda device, tables: make_call(device, tables, SkippedElements()), steps=4)
        for problem in (cpu, cuda)
    )
    assert_same(cuda.snapshot(), cpu.snapshot())
    cuda.assert_nothing_written_around()
    assert skipped == wanted > 0, (piece, block_size)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", HYPER)
def test_weight_formats_and_cut_blocks(rule: str, codec: str, weights: str) -> None:
    """Shows that every weight format gives the CPU's bits on whole rows, pieces and cut blocks."""
    for piece in PIECES.values():
        for block_size in filter(piece.is_in_blocks, (32, 128, 512)):
            assert_problem_same(rule, codec, weights, piece, block_size)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("codec", EIGHT_BIT)
@pytest.mark.parametrize("rule", HYPER)
def test_rows_of_any_length(rule: str, codec: str, weights: str) -> None:
    """Shows that rows of any length at any address give the CPU's bits, and that no byte is written around them."""
    for piece in ROWS.values():
        assert_problem_same(rule, codec, weights, piece)


def test_many_staged_rows() -> None:
    """Shows that staged rows of several tasks an entry, and several entries a launch, give the CPU's bits."""
    shapes = ((3001, 130), (1999, 257), (9001, 33), (777, 1000), (65, 2377), (1_000_003,))
    steps = [gradients(t, torch.bfloat16, shapes) for t in (1, 2, 4, 5)]
    wanted, _ = run(CPU, "adamw", "log8", start(torch.bfloat16, shapes), steps)
    assert_same(run(CUDA, "adamw", "log8", start(torch.bfloat16, shapes), steps)[0], wanted)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_unaligned_storage(codec: str) -> None:
    """Shows that tensors three elements behind an aligned address step as aligned ones."""
    initial = start(torch.bfloat16, SHAPES)
    behind = 3 * CODECS[codec].code_dtype.itemsize  # state is kept as bytes
    aligned, optimizer = make_on(CUDA, "adamw", codec, initial)
    odd = {name: Parameter(at_odd_offset(value.to(CUDA))) for name, value in initial.items()}
    odd_optimizer = RULES["adamw"].make(list(odd.values()), codec=codec, min_quantized_numel=0)
    for t in (1, 2, 3, 4):
        grads = {name: gradient.to(CUDA) for name, gradient in gradients(t, torch.bfloat16, SHAPES).items()}
        step_on(optimizer, aligned, grads)
        step_on(odd_optimizer, odd, {name: at_odd_offset(gradient) for name, gradient in grads.items()})
        for state in odd_optimizer.state.values():
            for entry, value in state.items():
                state[entry] = at_odd_offset(value, behind if value.dtype == torch.uint8 else 3)
    assert_same(snapshot_of(odd, odd_optimizer), snapshot_of(aligned, optimizer))


def _columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values with the first dimension last in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_strided_parameters(codec: str) -> None:
    """Shows that strided parameters, with gradients strided like them, step to the CPU's bits."""
    initial = {name: value for name, value in start(torch.bfloat16, SHAPES).items() if value.dim() > 1}
    params = {name: Parameter(_columns_first(value.to(CUDA))) for name, value in initial.items()}
    optimizer = RULES["adamw"].make(list(params.values()), codec=codec, min_quantized_numel=0, master_weight_bits=24)
    steps = [gradients(t, torch.bfloat16, SHAPES) for t in (1, 2, 3, 4)]
    wanted, skipped = run(CPU, "adamw", codec, initial, steps, master_weight_bits=24)
    for grads in steps:
        step_on(optimizer, params, {name: _columns_first(grads[name].to(CUDA)) for name in params})
    assert_same(snapshot_of(params, optimizer), wanted)
    assert optimizer.nonfinite_count == skipped


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_overflow(rule: str, codec: str) -> None:
    """Shows that gradients near the largest float give the CPU's bits."""
    huge = {name: gradient.clone() for name, gradient in gradients(2, FP32, SHAPES).items()}
    for gradient in huge.values():
        for at, value in HUGE.items():
            if at < gradient.numel():
                gradient.view(-1)[at] = value
    steps = [gradients(1, FP32, SHAPES), huge, gradients(4, FP32, SHAPES)]
    wanted, actual = (run(device, rule, codec, start(FP32, SHAPES), steps)[0] for device in (CPU, CUDA))
    assert_same(actual, wanted)


@pytest.mark.parametrize("dtype", message_problem.DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    """Shows that norms, clipped gradients and steps that clip have the CPU's bits, finite or not."""
    for numel in (2, 1030, 3_000_000)[: 3 if CUDA.type == "cuda" else 2]:
        for name, floats in message_problem.numbers(dtype, numel, numel):
            given = [floats, floats[1 : numel // 2], floats.view(-1, 2).t()]
            wanted, actual = (cuda_emulated.clipped([x.to(device) for x in given]) for device in (CPU, CUDA))
            for one, expected in zip(actual, wanted, strict=True):
                torch.testing.assert_close(one.cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_mixed_codecs_and_rules_in_one_step() -> None:
    """Shows that one step over groups of different codecs and options gives the CPU's bits."""
    initial = start(torch.bfloat16, SHAPES)

    def stepped(device: torch.device) -> Snapshot:
        params = {name: Parameter(value.to(device, copy=True)) for name, value in initial.items()}
        groups = [
            {"params": [param], "codec": CODEC_NAMES[i % len(CODEC_NAMES)], "momentum": 0.9 * (i % 3 > 0)}
            for i, param in enumerate(params.values())
        ]
        optimizer = RULES["momentum"].make(groups, min_quantized_numel=64)
        for t in (1, 2, 3):
            step_on(optimizer, params, gradients(t, torch.bfloat16, SHAPES))
        return snapshot_of(params, optimizer)

    assert_same(stepped(CUDA), stepped(CPU))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_state_moves_between_devices(codec: str) -> None:
    """Shows that a state that goes to and fro between devices goes on with the CPU's bits."""
    shapes = ((97, 130), (257,))
    steps = [gradients(t, FP32, shapes) for t in (1, 2, 4, 5)]
    wanted, _ = run(CPU, "adamw", codec, start(FP32, shapes), steps)
    params, optimizer = make_on(CPU, "adamw", codec, start(FP32, shapes))
    for gradient, device in zip(steps, (CUDA, CPU, CUDA, CPU), strict=True):
        moved = {name: param.detach() for name, param in params.items()}
        params, new = make_on(device, "adamw", codec, moved)
        new.load_state_dict(optimizer.state_dict())
        step_on(new, params, gradient)
        optimizer = new
    assert_same(snapshot_of(params, optimizer), wanted)


@needs_gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Shows that offsets beyond 31 bits are right: all rows are alike, and stay so."""
    rows, cols = 2**21 + 3, 1024
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory on the device")
    row = values((1, cols), 0, torch.bfloat16)
    gradient = (values((1, cols), 1) * 1e-2).to(torch.bfloat16)
    wanted, _ = run(CPU, "adamw", "log8", {"": row}, [{"": gradient}] * 2)
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
