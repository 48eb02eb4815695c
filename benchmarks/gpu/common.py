"""Common to all sections: the device, the report that is written after each finding, texts of programs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Wheels and programs of launch/gpu_prepare.sh.
CARRIED = ROOT / "build" / "gpu"
#: Whether the CPU stands in for a GPU, so that the flow can be tried.
FAKE = os.environ.get("GPU_FIRST_FAKE") == "1"
DEVICE = "cpu" if FAKE else "cuda"
#: Exit status of a process whose CUDA context a case has broken.
BROKEN = 3
TOOLS = os.environ.get("PATH", "") + ":/usr/local/cuda/bin"

Left = Callable[[], float]


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, so that nobody stays on the GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Report:
    """Findings, written after each one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found = self.of(path.stem)  # of a process before, whose context was broken

    def of(self, section: str) -> dict[str, Any]:
        """Findings of a section's process so far, if there is one."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._path.with_name(f"{section}.json").read_text()))
        return {}

    def put(self, key: str, value: Any) -> None:
        self.found[key] = value
        self.flush()

    def flush(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.found, default=str))
        os.replace(part, self._path)

    def attempt(self, key: str, left: Left, seconds: float, act: Callable[[], object]) -> None:
        """One part of a section: reported as left out if fewer seconds are left, and as failed if it raises."""
        if left() < (0.3 if FAKE else seconds):
            return self.put(key, "left out: no time left")
        try:
            act()
        except Exception as error:  # the part's own: others go on, unless the context is broken
            self.put(key, f"failed: {traceback.format_exc()[-1500:]}")
            if context_is_broken():
                raise error


def synchronize() -> None:
    """Waits for the GPU."""
    if not FAKE:
        import torch

        torch.cuda.synchronize()


def context_is_broken() -> bool:
    """Whether no later call of CUDA can succeed."""
    try:
        synchronize()
    except RuntimeError:
        return True
    return False


def text_of(*command: str, seconds: float = 15, tail: int = 4000, **options: Any) -> str:
    """Output of a program."""
    try:
        options.setdefault("preexec_fn", die_with_parent)
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace", **options)
        said = (done.stdout + done.stderr)[-tail:].strip()
        return f"STATUS {done.returncode}: {said}" if done.returncode else said
    except subprocess.TimeoutExpired as error:
        said = b"".join(x if isinstance(x, bytes) else x.encode() for x in (error.stdout, error.stderr) if x)
        return f"NOT FINISHED in {seconds:.0f} s: {said.decode(errors='replace')[-tail:]}"
    except OSError as error:  # there is no such program
        return f"{type(error).__name__}: {error}"
