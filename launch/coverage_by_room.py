"""Prints the share of lines that ran, per folder of shardopt, from the JSON report of coverage: see test.sh."""

import json
import sys
from collections import Counter
from pathlib import Path

lines, ran = Counter[str](), Counter[str]()
for path, file in json.loads(Path(sys.argv[1]).read_text())["files"].items():
    room = Path(path).parts[1]  # "checkpoint", or "report.py"
    for name in (room, "total"):
        lines[name] += file["summary"]["num_statements"]
        ran[name] += file["summary"]["covered_lines"]
for name in [*sorted(lines.keys() - {"total"}), "total"]:
    print(f"{name:16} {100 * ran[name] / max(lines[name], 1):5.1f}% of {lines[name]:5} lines")
