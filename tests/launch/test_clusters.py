"""launch/multinode for Kubernetes and SkyPilot, as far as one machine without a cluster can check them."""

from __future__ import annotations

import pytest
import yaml

from train_job import MULTINODE


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
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(MULTINODE / "skypilot.yaml"))
    assert task.num_nodes == 2
    script = (MULTINODE / "torchrun.sh").read_text()
    for variable in ("NODES", "RANKS_PER_NODE", "FIRST_NODE"):
        assert f"${{{variable}:-" in script
        assert f"{variable}=" in task.run
