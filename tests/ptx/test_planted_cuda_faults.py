"""The interpreter of PTX notices what a GPU would punish: kernels' PTX, spoilt in one place, fails a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest

import cuda_interpreted
from kernel_problem import gradients, start
from weight_formats import BF16

#: Whole, aligned blocks beside others, in one thread block; then less than a turn, several turns, several tasks.
SHAPES = ((9, 128), (19, 130), (75, 33), (1, 6528))
USUAL = "entry _ZN8shardopt4cuda16step_usual_tasksINS0_4AdamENS0_4Log8ELNS_12WeightFormatE"
#: Whatever the format, without master weights, and with those of 24 bits.
ANY, BFLOAT16, PLUS8 = USUAL, USUAL + "1", USUAL + "3"
PRODUCT_LESS = (
    r"mul\.rn\.f32 (%f\d+), (%f\d+), (%f\d+);((?:[^;]*;){0,12}?\s*)sub\.rn\.f32 (%f\d+), (%f\d+), \1;",
    r"mul.rn.f32 \1, \2, \3;\4neg.f32 \1, \2;\nfma.rn.f32 \5, \1, \3, \6;\nmul.rn.f32 \1, \2, \3;",
)


class Fault(NamedTuple):
    """A change of kernels' text.

    Attributes:
        kernels: the beginning of their declarations.
        pattern: of the text that is replaced.
        replacement: as in :func:`re.sub`.
        nth: which of the places found, from 0 on, is changed; None: all.
        options: of the interpreter.
    """

    kernels: str
    pattern: str
    replacement: str
    nth: int | None = None
    options: dict[str, object] = {}  # noqa: RUF012  never changed

    def made_in(self, text: str) -> str:
        def spoil(kernel: re.Match[str]) -> str:
            counted = 0

            def change(found: re.Match[str]) -> str:
                nonlocal counted
                counted += 1
                return found.expand(self.replacement) if self.nth in (None, counted - 1) else found[0]

            return re.sub(self.pattern, change, kernel[0])

        return re.sub(rf"^\.?(visible |weak )?\.?{self.kernels}.*?^\}}$", spoil, text, flags=re.MULTILINE | re.DOTALL)


FAULTS = {
    "the first warp barrier is missing": Fault(BFLOAT16, r"bar\.warp\.sync -1;", "", 0),
    "a wait for one group of copies too few": Fault(BFLOAT16, r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;"),
    "a copy from 16 bytes further": Fault(BFLOAT16, r"(\[%r\d+\]), \[(%rd\d+)\], 16, 16;", r"\1, [\2+16], 16, 16;", 0),
    "warps share their memory": Fault(
        BFLOAT16,
        r"(mov\.u32 (%r\d+), \w+memoryE;\n)mad\.lo\.s32 (%r\d+), %r\d+, %r\d+, \2;",
        r"\1mov.u32 \3, \2;",
    ),
    "products are fused": Fault(BFLOAT16, *PRODUCT_LESS),
    "an exchange names half of the warp": Fault(BFLOAT16, r"(shfl\.sync\.bfly\.b32 [^;]*), \S+;", r"\1, 65535;", 0),
    "a byte is stored one byte further": Fault(BFLOAT16, r"st\.shared\.u8 \[(%r\d+)\]", r"st.shared.u8 [\1+1]", 0),
    "approximations have no Newton step": Fault(
        BFLOAT16,
        r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), \2;",
        r"mov.f32 \1, \2;",
        options={"approximate": "farthest"},
    ),
    "prmt copies a byte where it repeats its sign": Fault(
        PLUS8, r"(mov\.[bu]32 %r\d+|prmt\.b32 [^;]*), (?:34820|39188|43556|47924);", r"\1, 4;"
    ),
    "skipped elements are counted without an atomic": Fault(
        ANY,
        r"(@%p\d+ )?atom\.global\.add\.u64 (%rd\d+), \[(%rd\d+)\], (%rd\d+);",
        r"ld.global.u64 \2, [\3]; add.s64 \2, \2, \4; st.global.u64 [\3], \2;",
    ),
}


#: Found in the default run; the others by --all.
QUICK = (
    "the first warp barrier is missing",
    "a wait for one group of copies too few",
    "warps share their memory",
    "products are fused",
    "an exchange names half of the warp",
    "a byte is stored one byte further",
    "prmt copies a byte where it repeats its sign",
)
on_sm_90 = pytest.mark.parametrize("kernels", [cuda_interpreted.KINDS["ptx90"]], indirect=True, ids=["ptx90"])


def notice(kernels: ModuleType) -> list[str]:
    """Whatever is noticed when blocks of both kinds are stepped: other bits than the CPU's, a stop, reports."""
    noticed = []
    for options in ({}, {"master_weight_bits": 24}, {"block_size": 64}):
        try:
            steps = [gradients(t, BF16, SHAPES) for t in (1, 2, 4, 5, 3)]
            cuda_interpreted.compare(kernels, "adamw", "log8", start(BF16, SHAPES), steps, **options)
        except (AssertionError, RuntimeError) as error:
            noticed.append(f"{type(error).__name__}: {error}")
    return noticed + kernels.take_reports()


@on_sm_90
def test_nothing_is_noticed_of_kernels_as_they_are(kernels: ModuleType) -> None:
    for options in ({}, {"approximate": "farthest"}):
        with cuda_interpreted.checked(kernels, **options):
            assert notice(kernels) == []


@on_sm_90
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAULTS])
def test_a_fault_is_noticed(kernels: ModuleType, name: str) -> None:
    spoil: Callable[[str], str] = FAULTS[name].made_in
    spoilt = [spoil(text) for text in kernels.ptx]
    assert spoilt != kernels.ptx, "nvcc writes this otherwise: adapt the fault's pattern"
    try:
        kernels.load(spoilt)
        with cuda_interpreted.checked(kernels, **FAULTS[name].options):
            noticed = notice(kernels)
    finally:
        kernels.load(kernels.ptx)
    print("\n".join(noticed))
    assert noticed
