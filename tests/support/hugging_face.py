"""Runs of Hugging Face's Trainer, Accelerate and PEFT on ranks of a pool: a tiny Llama on the CPU.

Accelerate shards on accelerators only, FSDP and DeepSpeed alike: :func:`as_accelerators` tells it that the ranks have
one. All else is theirs.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParamHandle

import shardopt
from checkpoint_folder import contents
from ranks.deepspeed import import_deepspeed

VOCABULARY, LENGTH = 64, 16
LAYER = "LlamaDecoderLayer"
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 64}


def fsdp(version: int, state: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {"version": version, "transformer_layer_cls_to_wrap": [LAYER]}
    if version == 1:
        config |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}  # the former needs an accelerator
    if state is not None:
        config["state_dict_type"] = state
    return {"fsdp": True, "fsdp_config": config}


def zero(stage: int = 2, offload: bool = False, **settings: Any) -> dict[str, Any]:
    to_cpu = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    usual = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.0}
    return {"deepspeed": {"zero_optimization": {"stage": stage, **to_cpu}, **usual, **settings}}


#: Arguments of TrainingArguments, by the way of sharding.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ddp": {"ddp_find_unused_parameters": False},
    "fsdp2": fsdp(2),
    "fsdp2 sharded": fsdp(2, "SHARDED_STATE_DICT"),
    "fsdp1": fsdp(1),
    "fsdp1 sharded": fsdp(1, "SHARDED_STATE_DICT"),
    "zero2": zero(),
    "zero2 offload": zero(offload=True),
    "zero2 by name": zero(optimizer={"type": "AdamW8bit", "params": {**OPTIONS, "weight_decay": 0.0}}),
    "zero3": zero(3),
    "zero3 offload": zero(3, offload=True),
}


def tiny_llama(vocabulary: int = VOCABULARY) -> nn.Module:
    """A Llama of 90 thousand parameters, the same on every call; most of its matrices are quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def tiny_qwen() -> nn.Module:
    """As :func:`tiny_llama`, but the embedding is the output layer as well."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=True, **sizes))


def natively_sharded(make: Callable[[], nn.Module], folder: Path, release: bool) -> list[Any]:
    """Weights, and norms if no gradients are released, of one process and under transformers' own FSDP2."""
    fresh("fsdp2")
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        make().save_pretrained(folder)
    dist.barrier()
    config, found = DistributedConfig(fsdp_size=dist.get_world_size()), []
    for model in (make(), AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)):
        optimizer = shardopt.AdamW8bit(model.parameters(), **OPTIONS)
        if release:
            shardopt.release_gradients(model, optimizer)
        for step in range(3):
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            norm = None if release else shardopt.clip_grad_norm_(model.parameters(), 0.5, optimizer=optimizer).item()
            optimizer.step()
            optimizer.zero_grad()
        params = (param.detach() for param in model.parameters())
        found.append([norm, *(getattr(x, "full_tensor", x.clone)().tolist() for x in params)])
    return found


def tiny_lora(dropout: float = 0.5) -> nn.Module:
    """The Llama with adapters of rank 32, whose matrices are quantized, behind dropout."""
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    return get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "v_proj"], lora_dropout=dropout))


class Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Other tokens in each step, but the same on every rank: then a mean over 2 or 4 ranks is exact.

    Args:
        per_step: examples that all ranks take together in a step.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step

    def __len__(self) -> int:
        return 8 * self._per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index // self._per_step)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def fresh(mode: str) -> None:
    """Forgets what Accelerate knows from an earlier run in this process, and describes this rank to it."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(here, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    if mode == "plain":
        for name in here:
            del os.environ[name]
    if mode.startswith("zero"):
        import_deepspeed()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def as_accelerators(mode: str) -> None:
    """Makes Accelerate take the CPU for an accelerator where the way of sharding needs one."""
    from accelerate.state import DistributedType, PartialState

    if mode.startswith("fsdp"):
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    if mode.startswith("fsdp1"):  # parameters that are on the CPU would be freed there once they have come from there
        FlatParamHandle.to_cpu = nullcontext
    if mode.startswith("zero"):
        PartialState._shared_state.update(distributed_type=DistributedType.DEEPSPEED, device=torch.device("cpu"))


def make_trainer(
    mode: str,
    output: Path,
    *,
    kind: Callable[..., Any] | None = None,
    model: Callable[[], nn.Module] = tiny_llama,
    callbacks: Sequence[Any] = (),
    optimizer: Any = shardopt.AdamW8bit,
    options: dict[str, Any] = OPTIONS,
    **more: Any,
) -> Any:
    """A Trainer of 6 steps that saves after the third, with AdamW8bit by its class, or by a name, ``optim=...``."""
    fresh(mode)
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, **deepcopy(MODES[mode]), **more}
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=6,
        per_device_train_batch_size=2,
        train_sampling_strategy="sequential",
        lr_scheduler_type="cosine",
        learning_rate=OPTIONS["lr"],
        max_grad_norm=0.0,  # a norm is summed in another order elsewhere
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    as_accelerators(mode)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    return (kind or Trainer)(
        model=model(),
        args=arguments,
        train_dataset=Batches(2 * dist.get_world_size()),
        optimizer_cls_and_kwargs=None if mode == "zero2 by name" or "optim" in more else (optimizer, dict(options)),
        callbacks=list(callbacks),
    )


def trained(
    mode: str,
    output: Path,
    resume: Path | None = None,
    *,
    portable: bool = False,
    max_norm: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Trains 6 steps in a mode of ``MODES``, of which another run's folder (``resume``) may have the first 3.

    With ``portable`` checkpoints are shardopt's, in place of Trainer's own; with ``max_norm`` the run clips, and saves
    nothing. Further arguments are those of :func:`make_trainer`. Returns the tensors of the end.
    """
    from shardopt.clients.transformers import ClipGradNorm, PortableCheckpoint

    start = None if resume is None else str(resume / "checkpoint-3")
    if portable:
        more = {"save_only_model": True, "callbacks": [PortableCheckpoint(start)], **more}
    if max_norm is not None:
        more = {"save_strategy": "no", "callbacks": [ClipGradNorm(max_norm)], **more}
    trainer = make_trainer(mode, output, **more)
    trainer.train(resume_from_checkpoint=start)
    assert trainer.state.global_step == 6
    return contents(trainer.model_wrapped, trainer.optimizer)


def accelerated(
    mode: str, folder: Path, resume: Path | None = None, *, portable: bool = False, max_norm: float | None = None
) -> dict[str, Any]:
    """Trains by a loop of one's own with Accelerate; arguments are as those of :func:`trained`."""
    fresh(mode)
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugins: dict[str, Any] = {}
    if "fsdp_config" in MODES[mode]:
        options = dict(MODES[mode]["fsdp_config"])
        names = {"version": "fsdp_version", "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
        options = {names.get(name, name): value for name, value in options.items()}
        policy = {"auto_wrap_policy": "transformer_based_wrap"}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(**policy, **options)
    if "deepspeed" in MODES[mode]:
        config = {**MODES[mode]["deepspeed"], "train_micro_batch_size_per_gpu": 2}
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    PartialState(cpu=True)
    as_accelerators(mode)
    accelerator = Accelerator(**plugins)
    model = tiny_llama()
    optimizer = shardopt.AdamW8bit(model.parameters(), **OPTIONS)
    if mode.startswith("fsdp1"):  # which makes other parameters
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(shardopt.AdamW8bit(model.parameters(), **OPTIONS))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    if resume is not None and portable:
        shardopt.checkpoint.load(resume, model, optimizer)
    elif resume is not None:
        accelerator.load_state(str(resume))
    data = Batches(2)
    for step in range(0 if resume is None else 3, 6):
        batch = {key: torch.stack([data[2 * step + i][key] for i in range(2)]) for key in ("input_ids", "labels")}
        accelerator.backward(model(**batch).loss)
        if max_norm is not None and accelerator.sync_gradients:
            shardopt.clip_grad_norm_(model.parameters(), max_norm, optimizer=optimizer.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and portable:
            shardopt.checkpoint.save(folder, model, optimizer)
        elif step == 2 and max_norm is None:
            accelerator.save_state(str(folder))
    return contents(model, optimizer)


def save_model(folder: Path) -> None:
    """Saves the Llama and a tokenizer of digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny_llama()
    model.config.update({"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0})
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(number): number + 3 for number in range(10)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=bare, **special).save_pretrained(folder)
