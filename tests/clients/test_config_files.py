"""Frameworks whose users write a config file, each run with one by its own program: two steps, and the options count.

axolotl, LLaMA-Factory and ms-swift need other versions of transformers than the other tests of clients: install each in
an environment of its own, by the extra of its name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import shardopt
from hugging_face import save_model
from needed import needs
from programs import Programs
from ranks.pool import Pool

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON = {
    "learning_rate": 1e-4,
    "max_steps": 2,
    "optim_args": "codec=log8, block_size=64, betas=(0.9, 0.9)",
    "output_dir": "run",
    "report_to": "none",
    "use_cpu": True,
}
NAMED = {**COMMON, "optim": "shardopt_adamw_8bit"}
TRL = {**NAMED, "model_name_or_path": "llama", "dataset_name": "data", "max_length": 32, "bf16": False}
LLAMA_FACTORY = {
    **NAMED,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "model_name_or_path": "llama",
    "dataset": "alpaca",
    "dataset_dir": ".",
    "template": "default",
    "cutoff_len": 32,
}
SWIFT = {
    **COMMON,
    "model": "llama",
    "model_type": "llama",
    "template": "dummy",
    "dataset": "alpaca.json",
    "tuner_type": "full",
    "torch_dtype": "float32",
    "external_plugins": "plugin.py",
    "optimizer": "shardopt_adamw_8bit",
}
AXOLOTL = {
    "base_model": "llama",
    "plugins": ["shardopt.clients.axolotl.Names"],
    "optimizer": "shardopt_adamw_8bit",
    "optim_args": {"codec": "log8", "block_size": 64, "betas": "(0.9, 0.9)"},
    "learning_rate": 1e-4,
    "datasets": [{"path": "data/train.jsonl", "type": "completion"}],
    "sequence_len": 32,
    "micro_batch_size": 2,
    "max_steps": 2,
    "bf16": False,
    "fp16": False,
    "output_dir": "run",
}
#: The package, its config, and the command that trains by config.yml.
CLIENTS = {
    "trl": (TRL, ["-m", "shardopt", "run", "-m", "trl.scripts.sft", "--config", "config.yml"]),
    "llamafactory": (LLAMA_FACTORY, ["-m", "shardopt", "run", "-m", "llamafactory.launcher", "config.yml"]),
    "swift": (SWIFT, ["-m", "swift.cli.main", "sft", "config.yml"]),
    "axolotl": (AXOLOTL, ["-m", "axolotl.cli.train", "config.yml"]),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_two_steps(client_ranks: Pool, client: str, tmp_path: Path) -> None:
    if find_spec(client) is None:
        extra = {"swift": "ms-swift"}.get(client, client)
        pytest.skip(f"{extra} not installed: pip install 'shardopt[{extra}]'")
    config, command = CLIENTS[client]
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "plugin.py").write_text("import shardopt.clients.swift\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9 0"}\n' * 8)
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": "1 2", "input": "", "output": "3 4"}] * 8))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"alpaca": {"file_name": "alpaca.json"}}))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
    client_ranks.run(1, save_model, tmp_path / "llama")
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (saved,) = tmp_path.glob("run/**/checkpoint-2/optimizer.pt")
    state = torch.load(saved, weights_only=True)
    assert any("exp_avg_sq_codes" in entries for entries in state["state"].values())
    group = state["param_groups"][0]
    assert (group["codec"], group["block_size"], tuple(group["betas"])) == ("log8", 64, (0.9, 0.9))
    assert state["state"][0]["step"] == 2


def test_verls_example_names_an_optimizer_with_its_options() -> None:
    config = yaml.safe_load((EXAMPLES / "verl.yaml").read_text(encoding="utf-8"))
    optim = config["actor_rollout_ref"]["actor"]["optim"]
    assert optim["optimizer_impl"] == config["actor_rollout_ref"]["model"]["external_lib"] == "shardopt"
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = getattr(shardopt, optim["optimizer"])([weight], lr=optim["lr"], **optim["override_optimizer_config"])
    optimizer.step()
    assert {"exp_avg_sq_codes", "master_low_bits"} <= optimizer.state[weight].keys()


@needs("verl")
@pytest.mark.client_ranks(1)
def test_verl_reads_the_example() -> None:
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    with initialize_config_dir(str(EXAMPLES), version_base=None):
        actor = omega_conf_to_dataclass(compose("verl").actor_rollout_ref.actor)
    engine = actor.engine
    assert (engine.strategy, engine.model_dtype, engine.optimizer_offload) == ("fsdp2", "bfloat16", True)
    optimizer = build_optimizer(torch.nn.Linear(64, 64, dtype=torch.bfloat16).parameters(), actor.optim)
    assert type(optimizer) is shardopt.AdamW8bit
    expected = {"lr": 1e-6, "codec": "log8", "master_weight_bits": 32}
    assert {option: optimizer.param_groups[0][option] for option in expected} == expected


#: Makes the plugin of a config file, and compares it with ``plugin``.
COMPARE = """
import os
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
args = launch_command_parser().parse_args(["--config_file", "fsdp2.yaml", "train.py"])
env = prepare_multi_gpu_env(_validate_launch_command(args)[0])
assert env["ACCELERATE_MIXED_PRECISION"] == accelerator.mixed_precision
os.environ |= {name: text for name, text in env.items() if name.startswith("FSDP_")}
by_file = FullyShardedDataParallelPlugin()
for name in ("fsdp_version", "auto_wrap_policy", "transformer_cls_names_to_wrap", "state_dict_type"):
    assert getattr(by_file, name) == getattr(plugin, name), name
"""


@needs("accelerate")
def test_accelerates_file_is_the_plugin_of_the_page(programs: Programs, tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "clients.md").read_text()
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "fsdp2.yaml").write_text(config)
    (snippet,) = re.findall(r"^```python\n((?:(?!^```).)*?fsdp_plugin.*?)^```$", page, re.MULTILINE | re.DOTALL)
    programs.run(snippet + COMPARE, tmp_path)
