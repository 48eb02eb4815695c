"""Reinforcement learning in miniature: while the model generates, the optimizer's state leaves the device.

python examples/rl_sleep_wake.py [STEPS]

A policy learns to generate the token that is rewarded. A rollout engine (vLLM, SGLang) would use the room. Runs
on the CPU, too, where all state is in the host's memory already.
"""

import sys

import torch
from torch import nn

import shardopt

steps, vocabulary, length = int(sys.argv[1]) if len(sys.argv) > 1 else 20, 64, 8
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(vocabulary, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, vocabulary))
policy.to(device)
optimizer = shardopt.AdamW8bit(policy.parameters(), lr=1e-3)


def state_bytes() -> str:
    """Where the state is."""
    report = shardopt.memory_report(optimizer)
    sizes = {"device": report.device, "host": report.host}
    return ", ".join(f"{use.state + use.scales:,} bytes on the {place}" for place, use in sizes.items())


@torch.no_grad()
def rollout(prompts: torch.Tensor) -> torch.Tensor:
    """Tokens that the policy generates, one after another."""
    tokens = [prompts]
    for _ in range(length):
        tokens.append(torch.distributions.Categorical(logits=policy(tokens[-1])).sample())
    return torch.stack(tokens, 1)


for step in range(steps):
    optimizer.offload()  # verl: with the parameters; DeepSpeed: engine.offload_states()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the rollout engine takes memory past PyTorch's allocator
    asleep = state_bytes()
    tokens = rollout(torch.randint(vocabulary, (64,), device=device))
    reward = (tokens[:, 1:] == 7).float().mean(1)
    optimizer.reload()  # copies go on beside the forward and backward pass
    log_probs = torch.distributions.Categorical(logits=policy(tokens[:, :-1])).log_prob(tokens[:, 1:]).sum(1)
    loss = -((reward - reward.mean()) * log_probs).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {1.0 - reward.mean().item():.3f}")
print(f"asleep: {asleep}; awake: {state_bytes()}")
