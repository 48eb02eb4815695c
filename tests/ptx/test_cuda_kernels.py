"""The CUDA kernels, as nvcc compiles them to PTX, and their calling equal the CPU's bit for bit, run by an interpreter.

The interpreter cannot show errors of ptxas, nor others that need a GPU: tests/gpu does.
"""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

import cuda_interpreted
import message_problem
from helpers import CODEC_NAMES, EIGHT_BIT, RULES, USUAL_RULES, Named, Shape, at_odd_offset, step
from kernel_problem import DTYPES, clipped, gradients, make, run, start, using
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt import _C
from shardopt.kernels.dispatch import CpuCall
from shardopt.kernels.dispatch_cuda import CudaCall
from slow_cases import slow
from step_tables import FORMATS, HYPER, PIECES, ROWS, Piece, Problem
from weight_formats import BF16, FP32

SHAPES = ((31,), (257,), (1030,), (3, 31), (70, 33), (2, 129), (3, 130), (33, 257), (1, 1032))
SOME_DTYPES = ("fp32", "bf16", "fp16-fp32")
LAUNCHED = 448  # gradients whose addresses a launch takes
#: Pairs whose kernels are among the few (csrc/step/instances.h), in float32, in which the last bit of an update shows;
#: other dtypes with one rule and codec; and Muon, both of whose passes are kernels.
IN_TURN = [*product(USUAL_RULES, CODEC_NAMES, ["fp32"])]
IN_TURN += [(rule, codec, "fp32") for rule in RULES for codec in ("log8", "fp32") if rule not in USUAL_RULES]
IN_TURN += [("repaid_adamw", "companded8", "fp32"), ("amsgrad", "log8", "bf16"), ("radam", "log8", "fp16-fp32")]
IN_TURN += [("muon", "log8", "bf16"), ("muon", "fp32", "fp16-fp32"), ("muon_in_waves", "fp32", "bf16")]


@pytest.mark.parametrize(
    ("rule", "codec", "dtypes"), [*IN_TURN, *slow(product(RULES, CODEC_NAMES, SOME_DTYPES), besides=IN_TURN)]
)
def test_equal_the_cpu(interpreted: ModuleType, rule: str, codec: str, dtypes: str) -> None:
    param_dtype, gradient_dtype = DTYPES[dtypes]
    steps = [gradients(t, gradient_dtype, SHAPES) for t in (1, 2, 3)]
    cuda_interpreted.compare(interpreted, rule, codec, start(param_dtype, SHAPES), steps)


#: Of whole, aligned blocks: less than a turn, turns and a rest, several tasks.
ALIGNED = ((2, 128), (9, 128), (3, 1152), (1, 6528))
ALIGNED_FORMATS: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "fp32": (FP32, {}),
    "bf16": (BF16, {}),
    "bf16+8": (BF16, {"master_weight_bits": 24}),
    "bf16+16": (BF16, {"master_weight_bits": 32}),
    "bf16 stochastic": (BF16, {"stochastic_rounding": True}),
}


def aligned_gradients(t: int, dtype: torch.dtype) -> Named:
    """NaN and Inf in step 3, a row without gradients in step 4, huge and tiny ones in step 6."""
    found = {name: gradient.clone() for name, gradient in gradients(t, dtype, ALIGNED).items()}
    for gradient in found.values():
        if t == 4:
            gradient[0] = 0.0
        elif t == 6:
            gradient[-1, ::7] *= 1e17
            gradient[-1, 1::5] *= 1e-30
    return found


def sparse_gradients(t: int, dtype: torch.dtype, shapes: tuple[Shape, ...]) -> Named:
    """Rows, blocks and elements that no gradient reaches, or only some whose squares are zero."""
    found = {name: gradient.clone() for name, gradient in gradients(t, dtype, shapes).items()}
    for gradient in found.values():
        gradient[:6] = 0.0
        gradient[4::9, ::3] = 1e-30
        gradient[7:, 5::7] = 0.0
    return found


#: The kernels of usual rules, codecs and formats: each rule and codec, each rule and format, each codec and format.
USUAL = [
    (rule, codec, weights)
    for (i, rule), (j, codec), (k, weights) in product(
        enumerate(USUAL_RULES), enumerate(EIGHT_BIT), enumerate(ALIGNED_FORMATS)
    )
    if (i + j + k) % 3 == 0
]
ALL_USUAL = product(USUAL_RULES, EIGHT_BIT, ALIGNED_FORMATS)
usual_kernels = pytest.mark.parametrize(("rule", "codec", "weights"), [*USUAL, *slow(ALL_USUAL, besides=USUAL)])


@usual_kernels
def test_aligned_blocks(interpreted: ModuleType, rule: str, codec: str, weights: str) -> None:
    dtype, options = ALIGNED_FORMATS[weights]
    steps = [aligned_gradients(t, dtype) for t in (1, 2, 3, 4, 5, 6, 7, 8)]
    before = interpreted.quick_turns()
    cuda_interpreted.compare(interpreted, rule, codec, start(dtype, ALIGNED), steps, **options)
    turns = len(steps) * (9 // 4 + 27 // 4 + 51 // 4)
    assert turns / 4 < interpreted.quick_turns() - before < turns


#: Whole, aligned blocks beside others: a thread block steps one, two or three tasks of the former, and the latter.
MIXED = (((9, 128), (19, 130)), ((9, 128), (2, 128), (75, 33), (5, 384), (3, 1000)))


@usual_kernels
def test_aligned_and_other_blocks(interpreted: ModuleType, rule: str, codec: str, weights: str) -> None:
    """Warps of a thread block take either kind: all kernels that step both. With zeros in the second moment, too."""
    dtype, options = ALIGNED_FORMATS[weights]
    for shapes, of_step in product(MIXED, (gradients, sparse_gradients)):
        steps = [of_step(t, dtype, shapes) for t in (1, 2, 4)]
        before = interpreted.quick_turns()
        cuda_interpreted.compare(interpreted, rule, codec, start(dtype, shapes), steps, **options)
        assert interpreted.quick_turns() > before


@pytest.mark.parametrize(("rule", "bits", "columns"), [("adamw", 24, 128), ("adamw", 32, 130), ("lion", 24, 128)])
def test_master_weights_set_from_outside(interpreted: ModuleType, rule: str, bits: int, columns: int) -> None:
    """Zeros, whose low bits may have the other sign, and weights at the end of the range: each in turns of its own."""
    shape, largest = (48, columns), torch.finfo(BF16).max
    actual: list[tuple[Snapshot, int]] = []
    for module in (None, interpreted):
        params, optimizer = make(rule, "log8", start(BF16, (shape,)), master_weight_bits=bits)
        (param,) = params.values()
        with pytest.MonkeyPatch.context() as monkeypatch, using("portable", threads=1):
            if module:
                cuda_interpreted.use(module, monkeypatch)
            for t in (1, 2, 5):
                step(optimizer, params, gradients(t, BF16, (shape,)))
            low = optimizer.state[param]["master_low_bits"].view(torch.int8 if bits == 24 else torch.int16).view(shape)
            for i, value in enumerate((0.0, -0.0, torch.inf, torch.nan, -largest)):
                assert (low[8 * i, ::9] < 0).any()
                param.data[8 * i, ::9] = value
            before = interpreted.quick_turns()
            step(optimizer, params, gradients(4, BF16, (shape,)))
            actual.append((snapshot(params, optimizer), interpreted.quick_turns() - before))
    (wanted, _), (got, quick_turns) = actual
    assert_same(got, wanted)
    assert quick_turns > 0


def test_misaligned_addresses(interpreted: ModuleType) -> None:
    """Gradients that do not begin where vectors may are staged; those that move there go to the general kernel."""
    aligned = [aligned_gradients(t, BF16) for t in (1, 2, 5)]
    odd = [{name: at_odd_offset(x) for name, x in gradient.items()} for gradient in aligned]
    for steps, is_taken in ((odd, True), ([aligned[0], *odd[1:]], False)):
        turns = []
        for taken in (steps[:1], steps):
            before = interpreted.quick_turns()
            cuda_interpreted.compare(interpreted, "adamw", "log8", start(BF16, ALIGNED), taken)
            turns.append(interpreted.quick_turns() - before)
        assert (turns[1] > turns[0]) == is_taken


def step_pieces(kernels: ModuleType, rule: str, codec: str, weights: str, pieces: dict[str, Piece]) -> None:
    """Steps tables of the pieces by either kernels, and demands that no byte around the tensors is written."""
    for name, piece in pieces.items():
        cpu, cuda = (Problem(rule, codec, weights, piece, 128, torch.device("cpu")) for _ in range(2))
        wanted = cpu.run(lambda _, *tables: CpuCall(*tables), steps=4)
        before = kernels.quick_turns()
        with pytest.MonkeyPatch.context() as monkeypatch:
            cuda_interpreted.use(kernels, monkeypatch)
            skipped = cuda.run(CudaCall, steps=4)
        assert_same(cuda.snapshot(), cpu.snapshot())
        for problem in (cpu, cuda):
            problem.assert_nothing_written_around()
        assert skipped == wanted > 0, name
        if pieces is ROWS:
            assert kernels.quick_turns() > before, f"{name}: usual numbers went to the general kernel"


#: Tables have the formats' names of their own, which these are.
STAGED = [({"adamw": "adam"}.get(rule, rule), codec, weights) for rule, codec, weights in USUAL]


@pytest.mark.parametrize(("rule", "codec", "weights"), STAGED)
def test_rows_of_any_length(interpreted: ModuleType, rule: str, codec: str, weights: str) -> None:
    step_pieces(interpreted, rule, codec, weights, ROWS)


#: All codecs, all formats, and all rules; whether a block is cut is one question more in the same kernels.
CUT = [*product(("adam",), CODEC_NAMES, ("bf16+8", "fp16+16"))]
CUT += [*product(("adam",), ("log8",), FORMATS), *product(HYPER, ("log8", "fp32"), ("bf16 stochastic",))]


@pytest.mark.parametrize(("rule", "codec", "weights"), sorted({*CUT}))
def test_weight_formats_and_cut_blocks(interpreted: ModuleType, rule: str, codec: str, weights: str) -> None:
    step_pieces(interpreted, rule, codec, weights, PIECES)


def test_a_launch_per_format(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned blocks, larger ones too, and staged ones are stepped by the same one; others by the general one."""
    batches: list[Any] = []

    def spy(**call: Any) -> None:
        batches.append(call["batches"])
        interpreted.step_cuda(**call)

    cuda_interpreted.use(interpreted, monkeypatch)
    monkeypatch.setattr(_C, "step_cuda", spy, raising=False)
    shapes = (*ALIGNED, (3, 130), (70, 33))
    for block_size in (128, 64):
        run("adamw", "log8", start(BF16, shapes), [gradients(1, BF16, shapes)], block_size=block_size)
    for block_size, shape in ((256, (9, 512)), (512, (9, 512)), (256, (9, 300))):
        run("adamw", "log8", start(BF16, (shape,)), [gradients(1, BF16, (shape,))], block_size=block_size)
    ((_, _, usual, begin, staged, end),), ((_, _, other, *_),), *rest = batches
    assert usual >= 0
    assert begin < staged < end
    assert other == -1
    assert [format_ for ((_, _, format_, *_),) in rest] == [usual, usual, -1]


def test_captured_steps_between_others(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [gradients(t, FP32, SHAPES) for t in (1, 2, 4, 5, 6)]
    wanted, _ = run("adamw", "log8", start(FP32, SHAPES), steps)
    cuda_interpreted.use(interpreted, monkeypatch)
    params, optimizer = make("adamw", "log8", start(FP32, SHAPES))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):  # a capture needs a step before it
        step(optimizer, params, steps[0])
    for gradient, capturing in zip(steps, (False, True, False, False, True), strict=True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=capturing: value)
        step(optimizer, params, gradient)
    assert_same(snapshot(params, optimizer), wanted)


SIZES = ((2, 5000), (70, 33), (3, 257), (2, 4096))
FORMATS = tuple(ALIGNED_FORMATS)
#: Rules, codecs, formats, shapes and block sizes. More gradients than a launch takes, and more matrices, whose steps
#: Muon counts in a launch of their own; repaid weights in short blocks, and in long ones, which are read three times.
OTHER_SIZES = [
    *(("adamw", codec, "fp32", SIZES, n) for n, codec in zip([16, 32, 64, 256, 512, 4096], 2 * EIGHT_BIT, strict=True)),
    ("adamw", "log8", "fp32", SIZES, 4096),
    ("adamw", "log8", "fp32", tuple((n,) for n in range(1, LAUNCHED + 3)), 128),
    ("muon", "fp32", "fp32", tuple((2 + n // 25, 2 + n % 25) for n in range(LAUNCHED + 20)), 128),
    *(("repaid_adamw", "companded8", weights, SHAPES, n) for weights, n in (("fp32", 16), ("bf16+8", 1024))),
    *(("repaid_adamw", "log8", "bf16+16", SHAPES, n) for n in (128, 1024)),
    *(("adamw", "log8", weights, ((9, 1024), (2, 512), (513,)), n) for weights in ALIGNED_FORMATS for n in (256, 512)),
    *(
        (rule, "dynamic8", weights, ((9, 1024), (3, 513)), 256)
        for rule in ("adamw", "lion")
        for weights in ALIGNED_FORMATS
    ),
]


@pytest.mark.parametrize(("rule", "codec", "weights", "shapes", "block_size"), OTHER_SIZES)
def test_other_sizes(
    interpreted: ModuleType, rule: str, codec: str, weights: str, shapes: tuple[Shape, ...], block_size: int
) -> None:
    assert interpreted.cuda_launched_gradients == LAUNCHED
    dtype, options = ALIGNED_FORMATS[weights]
    steps = [gradients(t, dtype, shapes) for t in (1, 3)]
    cuda_interpreted.compare(interpreted, rule, codec, start(dtype, shapes), steps, block_size=block_size, **options)


def test_norms(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, clipped gradients and steps that clip: the kernels of csrc/norm, and those of steps with a coefficient."""
    gradients_of = {
        f"{dtype} {name} {numel}": [floats, at_odd_offset(floats[: numel // 2]), floats.view(-1, 2).t()]
        for dtype in message_problem.DTYPES
        for numel in (2, 8, 70, 1030)
        for name, floats in message_problem.numbers(dtype, numel, numel)
    }
    gradients_of["several tasks"] = [torch.randn(8192 * 2 + 9), torch.randn(8192), torch.randn(8191)]
    with using("portable", threads=1):
        wanted = {name: clipped(given) for name, given in gradients_of.items()}
    cuda_interpreted.use(interpreted, monkeypatch)
    for name, given in gradients_of.items():
        for actual, expected in zip(clipped(given), wanted[name], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_roots(interpreted: ModuleType) -> None:
    for seed in range(50):
        words = torch.randint(-(2**40), 2**40, (_C.sum_words,), generator=torch.Generator().manual_seed(seed))
        words[seed % 20 + 1 :] = 0
        words[seed % 20] = 1 + seed
        words[-1] = {48: 1, 49: 2**32 + 1}.get(seed, 0)
        for is_magnitude in (False, True):
            actual, wanted = torch.zeros(2), torch.zeros(2)
            interpreted.clip_cuda(words.data_ptr(), is_magnitude, 0.3, actual.data_ptr(), 0, 0)
            _C.clip(words.data_ptr(), is_magnitude, 0.3, wanted.data_ptr())
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
