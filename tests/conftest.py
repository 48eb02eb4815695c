"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import pytest

# Before torch is imported, here and in the processes that tests start. Tests run side by side, and most tensors in them
# are small: with a thread per core in each process they take twice as long. Tests of several threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import shardopt  # noqa: F401  a source tree that is not built ends the session here, with one message
from programs import Programs
from ranks.pool import Pool
from versions import mend_training_on_the_cpu

mend_training_on_the_cpu()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Ranks to run distributed functions on: up to 4 processes on the CPU."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[Pool]:
    """Ranks for DeepSpeed, which replaces functions of torch for good in each process where it is."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def client_ranks() -> Iterator[Pool]:
    """Ranks for frameworks, which leave state in a process, and replace functions of torch as DeepSpeed does."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations of PyTorch are quickest on one."""
    saved = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(saved)


def pytest_configure(config: pytest.Config) -> None:
    for name in _POOLS:
        config.addinivalue_line(
            "markers",
            f"{name}(world_size, timeout=120): the test itself runs on every rank of a world of the fixture {name}; "
            "without a size, on as many ranks as its argument world_size says",
        )


_POOLS = ("ranks", "deepspeed_ranks", "client_ranks")
_RUN = pytest.StashKey[Callable[..., object]]()


@pytest.fixture(autouse=True)
def _run_on_ranks(request: pytest.FixtureRequest) -> None:
    """Finds the pool that a marked test runs on, before the test is called."""
    for name in _POOLS:
        marker = request.node.get_closest_marker(name)
        if marker is not None:
            request.node.stash[_RUN] = partial(request.getfixturevalue(name).run, **marker.kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a marked test on the ranks, where its module is imported, too, with the same arguments."""
    run = pyfuncitem.stash.get(_RUN, None)
    if run is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    sizes = [size for name in _POOLS for marker in pyfuncitem.iter_markers(name) for size in marker.args]
    run(sizes[0] if sizes else arguments["world_size"], partial(pyfuncitem.function, **arguments))
    return True


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs in processes of their own that have imported torch."""
    server = Programs()
    yield server
    server.close()
