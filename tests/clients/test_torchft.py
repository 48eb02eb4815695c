"""torchft: a replica that joins goes on with the others' bits, and a step that is not committed changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from needed import needs

pytestmark = needs("torchft")

#: Takes four steps with the other replica, after one that fails.
REPLICA = """
import hashlib, os, sys, time
from datetime import timedelta
from pathlib import Path
import shardopt, torch, torch.distributed as dist, torchft
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import snapshot

number, lighthouse, begun = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = make_net(seed=number)
optimizer = shardopt.AdamW8bit(model.named_parameters(), lr=1e-2, min_quantized_numel=64)
def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
def digest():
    whole = snapshot(dict(model.named_parameters()), optimizer)
    parts = [x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for _, x in sorted(whole.items())]
    return hashlib.sha256(b"".join([*parts, repr(optimizer.param_groups[0]["lr"]).encode()])).hexdigest()
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)), min_replica_size=1, load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, store_addr="127.0.0.1",
    store_port=store.port, rank=0, world_size=1, replica_id=f"r{number}", hostname="127.0.0.1",
    lighthouse_addr=lighthouse,
)
wrapped = torchft.Optimizer(manager, optimizer)
parallel = torchft.DistributedDataParallel(manager, model)
together, has_failed = 0, False
while together < 4:
    step = manager.current_step()
    wrapped.zero_grad()
    time.sleep(0 if together else 0.1)
    loss_of(parallel, make_batch(step, number)).backward()
    assert shardopt.clip_grad_norm_(model.parameters(), 1e-4, optimizer=optimizer) > 1e-4
    if step == 2 and number == 0:
        optimizer.param_groups[0]["lr"] = 3e-3
        begun.touch()
    fails = together == 2 and not has_failed
    has_failed |= fails
    if fails:
        manager.report_error(RuntimeError("planted"))
    before = digest()
    wrapped.step()
    assert (manager.current_step() == step) == (before == digest()) == fails
    together += not fails and manager.num_participants() == 2
    print(manager.current_step(), digest(), flush=True)
manager.shutdown(wait=False)
os._exit(0)
"""


def test_a_replica_joins(tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    begun, env = tmp_path / "begun", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=60_000)
    replicas = []
    try:
        for number in range(2):
            command = [sys.executable, "-c", REPLICA, str(number), lighthouse.address(), str(begun)]
            options = {"stdout": subprocess.PIPE, "stderr": (tmp_path / f"errors {number}").open("w")}
            replicas.append(subprocess.Popen(command, env=env, text=True, **options))
            while not begun.exists():
                assert replicas[0].poll() is None, (tmp_path / "errors 0").read_text()
        outputs = [replica.communicate(timeout=200)[0] for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    assert [replica.returncode for replica in replicas] == [0, 0], (tmp_path / "errors 1").read_text()
    first, second = ([line.split() for line in output.splitlines()] for output in outputs)
    assert first[-6:] == second  # the one by which it joins, four together, and the one that fails
