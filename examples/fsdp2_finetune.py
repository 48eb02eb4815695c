"""Fine-tunes a model of the Hugging Face Hub with FSDP2 in bf16: 8-bit AdamW state, 24-bit master weights.

torchrun --nproc_per_node 2 examples/fsdp2_finetune.py MODEL TEXT CHECKPOINT [STEPS]

MODEL is a folder or a name on the Hub, TEXT a file of UTF-8, which is read as bytes (for a real model: its tokenizer).
Started again, it goes on from CHECKPOINT, also on another number of ranks. With several GPUs take
torch.cuda.set_device(LOCAL_RANK) before all else.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import shardopt

name, text, folder, *rest = sys.argv[1:]
steps, batch, length = int(rest[0]) if rest else 100, 4, 64
if not dist.is_initialized():
    dist.init_process_group()
rank, local_rank = dist.get_rank(), dist.get_node_local_rank(fallback_rank=0)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
groups = shardopt.param_groups(model, no_decay=("*norm*",))
optimizer = shardopt.AdamW8bit(groups, lr=1e-3, weight_decay=0.01, master_weight_bits=24)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

first = 0
if (Path(folder) / "checkpoint.json").exists():
    extra = shardopt.checkpoint.load(folder, model, optimizer).extra
    schedule.load_state_dict(extra["schedule"])
    first = extra["step"]

tokens = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
for step in range(first, steps):
    generator = torch.Generator().manual_seed(1000 * step + rank)  # other examples on every rank and in every step
    starts = torch.randint(len(tokens) - length, (batch,), generator=generator).tolist()
    inputs = torch.stack([tokens[start : start + length] for start in starts]).to(device)
    loss = model(input_ids=inputs, labels=inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
shardopt.checkpoint.save(folder, model, optimizer, step=steps, schedule=schedule.state_dict())
