"""The process of one section: waits for its turn, a line with seconds, then writes what it finds to a file.

python benchmarks/gpu/section.py NAME PART PARTS FILE
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu.common import BROKEN, FAKE, Report

#: The module of each section; the section is its function of that name.
MODULES = {
    "facts": "facts",
    "smoke": "facts",
    "numbers": "facts",
    "races": "speed",
    "others": "speed",
    "tests": "cases",
    "fsdp": "training",
    "training": "training",
    "same": "training",
    "offload": "tools",
    "ncu": "tools",
    "sanitizer": "tools",
    "crash": "planted",
    "hang": "planted",
    "broken": "planted",
}


def main() -> int:
    """Takes turns until the input ends."""
    name, part, parts, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    report = Report(file)
    report.found.pop("error", None)
    act: Any = None
    with contextlib.suppress(ImportError, OSError):  # the turn says what failed
        act = getattr(importlib.import_module(f"gpu.{MODULES[name]}"), name)
    report.put("ready", True)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        try:
            act = act or getattr(importlib.import_module(f"gpu.{MODULES[name]}"), name)
            act(report, lambda end=end: end - time.monotonic(), part, parts)
        except Exception as error:  # the section's own; the report says it
            report.found["error"] = traceback.format_exc()[-3000:]
            if not FAKE and "CUDA error" in str(error):
                report.flush()
                return BROKEN
        report.put("turns", report.found.get("turns", 0) + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
