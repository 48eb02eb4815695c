"""launch/multinode/slurm.sbatch on a real Slurm: two slurmd on this machine are its two nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.pool import Pool
from train_job import MULTINODE, PROGRAMS, ROOT, TINY, assert_same_run, free_port, run_on, wait_for_checkpoint
from versions import needs_fsdp2_on_the_cpu

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
PATH = f"{PROGRAMS}:{os.environ['PATH']}:/usr/sbin"

pytestmark = [
    needs_fsdp2_on_the_cpu,
    pytest.mark.skipif(
        not all(shutil.which(name, path=PATH) for name in NEEDED),
        reason="there is no Slurm (Debian and Ubuntu: apt install slurm-wlm)",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as other users, which needs root"),
]

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
SchedulerParameters=bf_interval=1
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"

LONG = (*TINY, "--clip", "0", "--keep-checkpoints", "0", "--steps", "500", "--checkpoint-interval", "20")
LONG = (*LONG, "--stop-at-step", "80", "--backend", "fsdp2", "--config", str(ROOT / "configs" / "small.yaml"))


class Cluster:
    """A cluster of two nodes, which are this machine.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment |= {"OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "FIRST_NODE": "127.0.0.1"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host = socket.gethostname()
        nodes = "\n".join(NODE.format(number=number, host=host, port=free_port()) for number in (1, 2))
        config = CONFIG.format(host=host, folder=self.folder, controller=free_port(), nodes=nodes)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._wait_until(files["socket"].exists)
        self._start("slurmctld", "-D", "-i")
        for number in (1, 2):
            self._start("slurmd", "-D", "-N", f"node{number}")
        self._wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")

    def run(self, *command: str) -> str:
        """Runs a command, and returns its output, of both kinds."""
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.stdout

    def submit(self, text: Path, output: Path, *options: str) -> subprocess.Popen[str]:
        """Submits the script for a rank on each node; the process waits for the job, and prints its number."""
        command = ["sbatch", "--parsable", "--wait", f"--output={output}.log", "--nodes=2", "--ntasks-per-node=1"]
        command += ["--gpus-per-node=0", "--cpus-per-task=1", str(MULTINODE / "slurm.sbatch"), *options]
        command += ["--data", str(text), "--output", str(output)]
        return subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def stop(self) -> None:
        self.run("scancel", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait_until(self, holds: object, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        assert callable(holds)
        while not holds():
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.slow  # Slurm waits for two minutes before it starts a job again
def test_a_requeued_job_goes_on(cluster: Cluster, ranks: Pool, text: Path, tmp_path: Path) -> None:
    """Slurm starts it again on both nodes, from its last checkpoint, and nothing shows in the end."""
    whole, requeued = tmp_path / "whole", tmp_path / "requeued"
    run_on(ranks, 2, *LONG, "--data", text, "--output", whole)
    process = cluster.submit(text, requeued, *LONG)
    assert process.stdout is not None
    number = process.stdout.readline().strip()
    wait_for_checkpoint(requeued, process)
    assert cluster.run("scontrol", "requeue", number) == ""
    said = process.communicate(timeout=240)[0]
    log = Path(f"{requeued}.log").read_text()
    assert process.returncode == 0, said + log
    assert f"resumed {requeued}/checkpoints/step-" in log
    assert_same_run(requeued, whole, steps=(20, 40, 60, 80))
