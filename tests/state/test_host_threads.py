"""The warning about a CPU's step in one thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from shardopt.kernels import transfers_cuda
from shardopt.optim import AdamW
from shardopt.state import host_threads
from shardopt.state.host_threads import warn_of_one_thread

MESSAGE = "got 1 thread for the CPU's steps, expected up to 6"


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_threads, "_cores", lambda: 12)
    warn_of_one_thread.cache_clear()
    yield
    warn_of_one_thread.cache_clear()


@pytest.mark.parametrize(("threads", "ranks"), [(2, 2), (1, 12), (1, 24)])
def test_does_not_warn(monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_thread(ranks)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offload", ["step", "state"])
def test_the_first_step_that_leaves_a_gpu_warns(monkeypatch: pytest.MonkeyPatch, offload: str) -> None:
    monkeypatch.setattr(transfers_cuda, "CudaTransfers", lambda *args, **options: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    residency = AdamW([torch.nn.Parameter(torch.zeros(2))])._internals.residency
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        residency.transfers(torch.device("cuda"), offload)
        residency.transfers(torch.device("cpu"), offload)
    assert [MESSAGE in str(each.message) for each in caught] == ([True] if offload == "step" else [])
