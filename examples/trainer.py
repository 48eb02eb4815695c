"""Fine-tunes by Hugging Face's Trainer; checkpoints load on any number of ranks.

torchrun --nproc_per_node 2 examples/trainer.py MODEL TEXT OUTPUT [STEPS]     (or: accelerate launch, or plain python)

MODEL is a folder or a name on the Hub, TEXT a file of UTF-8, which is read as bytes (for a real model: its tokenizer).
Started again, it goes on from the last checkpoint in OUTPUT.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardopt
from shardopt.clients.transformers import PortableCheckpoint

name, text, output, *rest = sys.argv[1:]


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of the text."""

    length = 64

    def __init__(self, path: str) -> None:
        self._tokens = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": tokens, "labels": tokens}


trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(name),
    args=TrainingArguments(
        output_dir=output,
        max_steps=int(rest[0]) if rest else 100,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_steps=3,
        save_only_model=True,  # PortableCheckpoint saves the rest
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=Windows(text),
    optimizer_cls_and_kwargs=(shardopt.AdamW8bit, {"lr": 1e-3}),
    callbacks=[PortableCheckpoint()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if Path(output).is_dir() else None)
