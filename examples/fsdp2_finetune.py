"""Fine-tunes a Hugging Face model with FSDP2, bfloat16 weights with masters, and clipping: see docs/finetune.md."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import shardopt

name, text, run, *rest = sys.argv[1:]
steps = int(rest[0]) if rest else 100
if not dist.is_initialized():
    dist.init_process_group()
rank, device = dist.get_rank(), torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)

model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
model.to(device)
for module in (*model.model.layers, model):
    fully_shard(module)

groups = shardopt.param_groups(model, no_decay="auto")
optimizer = shardopt.AdamW8bit(groups, lr=1e-3, master_weight_bits=24)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

first, folder = 0, f"{run}/checkpoint"
if Path(folder, "checkpoint.json").exists():
    extra = shardopt.checkpoint.load(folder, model, optimizer).extra
    scheduler.load_state_dict(extra["scheduler"])
    first = extra["step"]

data = bytearray(Path(text).read_bytes())
tokens = torch.frombuffer(data, dtype=torch.uint8).long().to(device)
for step in range(first, steps):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(tokens) - 64, (4,), generator=generator)
    inputs = torch.stack([tokens[start : start + 64] for start in starts])
    loss = model(input_ids=inputs, labels=inputs).loss
    loss.backward()
    shardopt.clip_grad_norm_(model.parameters(), 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    if step + 1 in (steps // 2, steps):
        saved = {"step": step + 1, "scheduler": scheduler.state_dict()}
        shardopt.checkpoint.save(folder, model, optimizer, **saved)

options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = dcp.get_model_state_dict(model, options=options)
if rank == 0:
    model.save_pretrained(f"{run}/model", state_dict=weights)
