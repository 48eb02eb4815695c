"""The GPU's command, on the CPU: a section that fails ends alone, and its file is complete at every moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import results
import write_results
from gpu.predictions import PREDICTIONS, measured, text_of
from gpu.speed import FIRST, OTHERS

COMMAND = [str(results.ROOT / "launch" / "gpu_first.sh"), "--fake", "--only"]


def test_failing_sections_end_alone(tmp_path: Path) -> None:
    command, file = [*COMMAND, "smoke", "hang", "broken", "raising"], tmp_path / "first.json"
    env = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            assert not file.exists() or json.loads(file.read_text())  # a complete one at every moment
            time.sleep(0.02)
    assert process.returncode == 0
    found = json.loads(file.read_text())
    assert found["outcomes"] == {
        "smoke": ["ended"],
        "hang": ["did not end in time"],
        "broken": ["broke its CUDA context"],
        "raising": ["ended"],
    }
    assert found["sections"]["smoke"][0]["log8, torch.bfloat16"] == "same bits"
    assert all(found["sections"][name][0]["before"] == 1 for name in ("hang", "broken"))
    assert "KeyError: 'missing'" in found["sections"]["raising"][0]["first"]
    assert found["sections"]["raising"][0]["second"] == 1


def test_races_become_a_table_beside_predictions(tmp_path: Path) -> None:
    times = {"ms": 3.5, "fastest": 3.4, "host us": 90.0, "GB/s": 2911.0, "of copy": 0.97}
    race = {"parameters": 10**9, "log8 bf16": times, "log8 bf16: first three steps, s": 1.0, "torchao bf16": "left out"}
    sections = {"facts": [{"device": {"name": "NVIDIA H100"}}], "races": [{"one: log8 bf16, torchao bf16": race}]}
    found = {"began": "2027-01-02 03:04:05", "sections": sections}
    (tmp_path / "first.json").write_text(json.dumps(found))
    table = write_results.of_gpu(tmp_path / "first.json")
    assert table.kind == "nvidia-h100"
    assert table.rows == (("one, log8 bf16", 3.5, 3.4, 2911.0, 0.97, 0.95, 90.0),)
    (said,) = (text_of(*each) for each in measured(found))
    assert said.startswith("one, log8 bf16: 3.5 ms, 0.97 of a copy, host 90.0 us; predicted 0.95 of a copy, ")


def test_each_prediction_is_of_a_race() -> None:
    races = {name for name, *_ in (*FIRST, *OTHERS)}
    contenders = {name for *_, names in (*FIRST, *OTHERS) for name in names}
    assert set(PREDICTIONS) <= races | contenders
