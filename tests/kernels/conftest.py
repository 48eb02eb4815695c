"""The CUDA kernels without a GPU, for the tests that compare them with the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

import cuda_emulated
import cuda_interpreted

_NVCC = cuda_interpreted.has_nvcc()
_needs_nvcc = pytest.mark.skipif(not _NVCC, reason="the kernels' PTX is not run: there is no nvcc")


def _kinds() -> list[object]:
    """What nvcc makes of the kernels, where there is one; else their source, which --all runs anyway."""
    kinds = [pytest.param("source", marks=[pytest.mark.slow] if _NVCC else [])]
    for arch in cuda_interpreted.ARCHS:
        marks = [_needs_nvcc] if arch == "90" else [_needs_nvcc, pytest.mark.slow]
        kinds.append(pytest.param(f"ptx{arch}", marks=marks))
    return kinds


@pytest.fixture(scope="module", params=_kinds())
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if request.param == "source":
        return cuda_emulated.build(tmp_path_factory.mktemp("cuda_emulated"))
    return cuda_interpreted.build(request.param.removeprefix("ptx"))


@pytest.fixture
def emulated(kernels: ModuleType) -> Iterator[ModuleType]:
    """Kernels for :func:`cuda_emulated.use`; afterwards the interpreter must have nothing to report."""
    if not cuda_interpreted.is_interpreter(kernels):
        yield kernels
        return
    with cuda_interpreted.checked(kernels):
        yield kernels
        found = kernels.take_reports()
    assert not found, "\n".join(found)
