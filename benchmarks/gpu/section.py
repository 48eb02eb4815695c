"""The process of one section: waits for its turn, a line with seconds, then writes what it finds to a file.

python -m gpu.section MODULE NAME PART PARTS FILE
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu.common import BROKEN, Report, context_is_broken


def main() -> int:
    """Takes turns until the input ends."""
    module, name, part, parts = f"gpu.{sys.argv[1]}", sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    report = Report(Path(sys.argv[5]))
    report.found.pop("error", None)
    act: Any = None
    with contextlib.suppress(ImportError, OSError):  # the turn says what failed
        act = getattr(importlib.import_module(module), name)
    report.put("ready", True)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        try:
            act = act or getattr(importlib.import_module(module), name)
            act(report, lambda end=end: end - time.monotonic(), part, parts)
        except Exception:  # the section's own; the report says it
            report.put("error", traceback.format_exc()[-3000:])
            if context_is_broken():
                return BROKEN
        report.put("turns", report.found.get("turns", 0) + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
