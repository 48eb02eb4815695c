"""Steps in a process of their own: with the threads that it gets, and without memory of their own."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from programs import Programs

_PROGRAM = """
import ctypes

import torch

import shardopt


def make():
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(300, 1000, generator=generator))
    param.grad = torch.randn(300, 1000, generator=generator)
    return param, shardopt.AdamW([param], lr=0.01)


def step(optimizer, threads):
    torch.set_num_threads(threads)
    optimizer.step()
    torch.set_num_threads(1)  # else torch's own operations would start threads


torch.set_num_threads(1)
(param, optimizer), (other, expected) = make(), make()
for threads in (BEFORE, 8, 2):
    step(optimizer, threads)
    step(expected, 1)
    if threads == BEFORE:
        libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        assert libc.pthread_getattr_default_np(attributes) == 0
        assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 60)) == 0  # no room for any other
        assert libc.pthread_setattr_default_np(attributes) == 0
assert torch.equal(param, other)
state, other_state = optimizer.state[param], expected.state[other]
assert all(torch.equal(state[key], other_state[key]) for key in other_state)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "pthread_setattr_default_np"), reason="needs glibc")
@pytest.mark.parametrize("before", [1, 3])
def test_a_step_does_with_the_threads_that_start(programs: Programs, before: int, tmp_path: Path) -> None:
    """With ``before`` threads running no other can start; the steps are those of one thread, bit for bit."""
    programs.run(_PROGRAM.replace("BEFORE", str(before)), tmp_path)


_FIRST_STEPS = """
import os
import sys
import threading

import torch

import shardopt


def first_step():
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = shardopt.AdamW8bit([param])
    together.wait()
    optimizer.step()


sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
threads = [threading.Thread(target=first_step, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(timeout=30)
os._exit(any(thread.is_alive() for thread in threads))
"""


def test_threads_take_the_first_steps_of_a_process_at_once(programs: Programs, tmp_path: Path) -> None:
    """The first step looks up how to read tensors; a lock for that was held while another thread had the GIL."""
    programs.run(_FIRST_STEPS, tmp_path)


_MEMORY = """
import ctypes

import torch

import shardopt


def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


param = torch.nn.Parameter(torch.zeros(20_000, 1000, dtype=torch.bfloat16))
param.grad = torch.full_like(param, 1e-3)
optimizer = shardopt.AdamW([param], codec="log8")
optimizer.step()
try:  # else what the first step freed would hide what the second takes
    ctypes.CDLL(None).malloc_trim(0)
except AttributeError:
    pass  # not glibc
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")  # sets the peak back to what is resident now
before = resident("VmRSS")
optimizer.step()
assert resident("VmHWM") - before < 2**20
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_on_20m_parameters_needs_no_memory(programs: Programs, tmp_path: Path) -> None:
    """No temporaries: the resident memory's peak hardly rises."""
    programs.run(_MEMORY, tmp_path)
