"""The scripts in benchmarks/ start, and the exchange's counts come from the code that steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import exchange
from decoder import Architecture, Decoder
from ranks.pool import Pool

BENCHMARKS = Path(exchange.__file__).parent

#: Modules that scripts import, and nobody runs.
MODULES = (
    "/decoder.py",
    "/measuring.py",
    "/muon_ranks.py",
    "/result_bars.py",
    "/result_timeline.py",
    "/results.py",
)

HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    print("script", script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, (script, end.code)
"""


def test_every_script_starts() -> None:
    """In one process, which imports PyTorch once."""
    scripts = sorted(str(script) for script in BENCHMARKS.glob("*.py"))
    command = [sys.executable, "-c", HELP, *scripts]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    usages = [text.partition("\n")[2] for text in done.stdout.split("script ")[1:] if "\n" in text]
    helped = [script for script, usage in zip(scripts, usages, strict=True) if usage.startswith("usage: ")]
    assert helped == [script for script in scripts if not script.endswith(MODULES)]


def _count() -> exchange.Count:
    torch.manual_seed(0)
    model = Decoder(Architecture.of_numel(200_000))
    numel = sum(param.numel() for param in model.parameters())
    sharded = exchange.shard(model)
    return exchange.count("small", numel, sharded, exchange.make_optimizer(sharded))


def test_counts_of_the_exchange(ranks: Pool) -> None:
    first, second = ranks.run(2, _count)
    assert first.cut_blocks == second.cut_blocks > 0
    roll = 8 * (1 + first.cut_blocks)  # an entry per parameter, of which each has one
    assert first.round_bytes == second.round_bytes == 2 * 8 * first.cut_blocks + roll
    assert first.rounds == second.rounds == 2
