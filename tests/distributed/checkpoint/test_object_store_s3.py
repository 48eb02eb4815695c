"""Checkpoints in S3: a server of moto in a process of its own, three ranks save and two load."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import fsspec
import pytest

import shardopt
from ranks.pool import Pool
from ranks.runs import snapshot_of, trained
from ranks.snapshot import Snapshot, assert_same
from shardopt.checkpoint import CheckpointError

needed = ("moto", "flask", "s3fs", "boto3")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'moto[server]' s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with an empty bucket."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=address, **keys)
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="runs")
            break
        except (BotoCoreError, ClientError):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not answer in a minute"
            time.sleep(0.2)
    yield address
    process.send_signal(signal.SIGKILL)
    process.wait()


def _reach(address: str) -> None:
    """Says where S3 is, as the environment of a job does."""
    os.environ.update(
        AWS_ENDPOINT_URL=address, AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1"
    )


def _save(address: str, step: int) -> Snapshot:
    _reach(address)
    model, optimizer = trained("fsdp", 1, seed=step)
    shardopt.checkpoint.save(f"s3://runs/step-{step}", model, optimizer, keep_last=2, step=step)
    return snapshot_of(model, optimizer)


def _load(address: str, step: int) -> Snapshot:
    _reach(address)
    model, optimizer = trained("fsdp", 1, seed=50)
    assert shardopt.checkpoint.load(f"s3://runs/step-{step}", model, optimizer).extra == {"step": step}
    return snapshot_of(model, optimizer)


def _load_nothing(address: str, step: int) -> str:
    _reach(address)
    with pytest.raises(CheckpointError) as error:
        shardopt.checkpoint.load(f"s3://runs/step-{step}", *trained("fsdp", 1))
    return str(error.value)


def test_ranks_save_and_others_load(ranks: Pool, server: str) -> None:
    _reach(server)
    store = fsspec.filesystem("s3")
    stray = "runs/step-0/0123456789abcdef-0.bin"
    store.pipe_file(stray, b"data")  # another job might be saving it
    saved = [ranks.run(3, _save, server, step)[0] for step in (1, 2, 3)]
    assert store.exists(stray)
    for step in (2, 3):
        for loaded in ranks.run(2, _load, server, step):
            assert_same(loaded, saved[step - 1])
    for message in ranks.run(2, _load_nothing, server, 1):
        assert "s3://runs/step-1: there is no such folder" in message
