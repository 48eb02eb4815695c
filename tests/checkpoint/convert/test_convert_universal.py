"""DeepSpeed's universal checkpoints as source: against the portable checkpoint of the same engine."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from convert_runs import Evil
from ranks.deepspeed import config, stepped_engine
from ranks.pool import Pool
from ranks.snapshot import assert_same
from safetensors_files import content
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import convert
from shardopt.checkpoint.reading import read_index

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")

BF16 = {"bf16": {"enabled": True}}


def _save(path: Path, settings: dict[str, Any], grouped: bool) -> None:
    engine = stepped_engine(settings, 3, grouped=grouped)
    engine.save_checkpoint(str(path))
    checkpoint.save(path / "saved", engine)
    dist.barrier()
    if dist.get_rank() == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        tag = (path / "latest").read_text().strip()
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": str(path / tag), "output_folder": str(path / "universal")}
        main(Namespace(**folders, **options, inject_missing_state=True))
    dist.barrier()


@pytest.mark.parametrize(
    ("stage", "other", "grouped"),
    [
        (1, {}, True),
        (3, {}, True),
        pytest.param(2, BF16, False, marks=pytest.mark.slow),
        pytest.param(3, BF16, False, marks=pytest.mark.slow),
    ],
)
def test_as_the_portable_checkpoint(
    deepspeed_ranks: Pool, tmp_path: Path, stage: int, other: dict[str, Any], grouped: bool
) -> None:
    deepspeed_ranks.run(2, _save, tmp_path, config(stage, **other), grouped)
    files = []
    for name in ("universal", "saved"):
        file = tmp_path / f"{name}.safetensors"
        convert(tmp_path / name, file, "safetensors", codec="fp32", piece_numel=4096)
        files.append(file)
    assert_same(*(content(file)[0] for file in files))
    convert(tmp_path / "universal", tmp_path / "portable", codec="log8", block_size=64, piece_numel=4096)
    assert any(name.endswith("_codes") for name in read_index(tmp_path / "portable"))


def test_damaged_and_hostile_folders(deepspeed_ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_ranks.run(1, _save, tmp_path, config(1), False)
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "universal"

    def refused(match: str) -> None:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path / "damaged", tmp_path / "portable", piece_numel=4096)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        shutil.rmtree(tmp_path / "damaged")

    def damaged() -> Path:
        return Path(shutil.copytree(whole, tmp_path / "damaged"))

    for name in ("zero/optimizer_state.pt", "zero/up.weight/exp_avg.pt", "mp_rank_00_model_states.pt"):
        torch.save(Evil(), damaged() / name)
        refused("expected one of torch.save")
    (damaged() / "zero/up.weight/exp_avg_sq.pt").unlink()
    refused("exp_avg_sq.pt: got NoneType, expected a file with a tensor")
    shutil.rmtree(damaged() / "zero" / "up.weight")
    refused("fp32.pt: got NoneType")
    torch.save({"param": torch.zeros(7)}, damaged() / "zero/up.weight/exp_avg.pt")
    refused("got 7 elements, expected those of")
    model = torch.load(whole / "mp_rank_00_model_states.pt", weights_only=True)
    model["param_shapes"][0]["../../secret"] = torch.Size([3])
    torch.save(model, damaged() / "mp_rank_00_model_states.pt")
    refused("expected names of folders in zero")
    (damaged() / "mp_rank_00_model_states.pt").unlink()
    refused("model_states.pt, expected the files")
