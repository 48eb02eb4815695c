"""Trains a small language model from scratch by Muon with 8-bit momentum, sharded by FSDP2.

torchrun --nproc_per_node 2 examples/muon_pretrain.py TEXT [STEPS]

TEXT is a file, read as bytes. Muon has the hidden matrices; AdamW has the embedding, the head, biases and norms.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardopt

text, *rest = sys.argv[1:]
steps, batch, length = int(rest[0]) if rest else 100, 8, 64
if not dist.is_initialized():
    dist.init_process_group()
device = torch.device("cuda", dist.get_node_local_rank(0)) if torch.cuda.is_available() else torch.device("cpu")


class ByteModel(nn.Module):
    """A causal transformer on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.head = nn.Embedding(256, 64), nn.Embedding(length, 64), nn.Linear(64, 256)
        layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


torch.manual_seed(0)
model = ByteModel().to(device)
for module in (*model.layers, model):
    fully_shard(module)
split = {"*.in_proj_weight": (64, 64, 64)}  # queries, keys and values are three matrices
optimizer = shardopt.Muon8bit(shardopt.muon_groups(model, lr=2e-2, adamw_lr=3e-3, split=split), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
tokens = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long()
for step in range(steps):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator).tolist()
    window = torch.stack([tokens[start : start + length + 1] for start in starts]).to(device)
    loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
