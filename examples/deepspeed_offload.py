"""DeepSpeed's ZeRO 2 with the optimizer on the host: 8-bit state in 2 bytes per parameter instead of 8.

deepspeed examples/deepspeed_offload.py CHECKPOINT [STEPS]     (or: torchrun --nproc_per_node 2 ...)

Started again, it goes on from CHECKPOINT, also on another number of ranks or stage of ZeRO.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

import shardopt

#: The type names our optimizer; nothing else is needed but "import shardopt".
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}},
    "gradient_clipping": 1.0,
}

arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
folder, steps = arguments[0], int(arguments[1]) if len(arguments) > 1 else 100

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
first = 0
if (Path(folder) / "checkpoint.json").exists():
    first = shardopt.checkpoint.load(folder, engine).extra["step"]
for step in range(first, steps):
    generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
    inputs = torch.randn(8, 256, generator=generator).to(engine.device, torch.bfloat16)
    loss = (engine(inputs) - inputs).float().square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
shardopt.checkpoint.save(folder, engine, step=steps)
if engine.global_rank == 0:
    print(shardopt.memory_report(engine.basic_optimizer))
