"""The CUDA kernels on the interpreter of PTX, for the tests that compare them with the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cuda_interpreted

_KINDS = [
    pytest.param(kind, id=name, marks=[] if name == "ptx90" else [pytest.mark.slow])
    for name, kind in cuda_interpreted.KINDS.items()
]
_compiling: list[subprocess.Popen[bytes]] = []


def _ours(session: pytest.Session) -> list[pytest.Item]:
    return [item for item in session.items if item.path.parent == Path(__file__).parent]


def _needs_few(session: pytest.Session) -> bool:
    """Whether only cases of the default run are to come, for which half of the kernels will do."""
    return not any(item.get_closest_marker("slow") for item in _ours(session))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the kernels while other tests run, which takes a minute or two."""
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    wanted = is_first and _ours(session) and not session.config.option.collectonly
    if wanted and cuda_interpreted.has_nvcc() and _needs_few(session):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        _compiling.append(subprocess.Popen([sys.executable, cuda_interpreted.__file__], **quiet))


@pytest.fixture(scope="module", params=_KINDS)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if not cuda_interpreted.has_nvcc():
        pytest.skip("there is no nvcc to compile the CUDA kernels")
    arch, options = request.param
    module = cuda_interpreted.build(arch, _needs_few(request.session))
    module.options = options
    return module


@pytest.fixture
def interpreted(kernels: ModuleType) -> Iterator[ModuleType]:
    """Kernels for :func:`cuda_interpreted.use`; afterwards the interpreter must have nothing to report."""
    with cuda_interpreted.checked(kernels):
        yield kernels
        found = kernels.take_reports()
    assert not found, "\n".join(found)
