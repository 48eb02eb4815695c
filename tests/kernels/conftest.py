"""The CUDA kernels without a GPU, for the tests that compare them with the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

import cuda_emulated
import cuda_interpreted

_NVCC = cuda_interpreted.has_nvcc()
SOURCE = ("source", {})


def _kinds() -> Iterator[object]:
    """The kernels as nvcc compiles them for sm_90, or their source where there is no nvcc; --all runs every kind."""
    yield pytest.param(SOURCE, id="source", marks=[pytest.mark.slow] if _NVCC else [])
    for name, kind in cuda_interpreted.KINDS.items():
        yield pytest.param(kind, id=name, marks=[] if name == "ptx90" else [pytest.mark.slow])


@pytest.fixture(scope="module", params=_kinds())
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if request.param == SOURCE:
        return cuda_emulated.build(tmp_path_factory.mktemp("cuda_emulated"))
    if not _NVCC:
        pytest.skip("the kernels' PTX was not run: there is no nvcc")
    arch, options = request.param
    module = cuda_interpreted.build(arch)
    module.options = options
    return module


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
