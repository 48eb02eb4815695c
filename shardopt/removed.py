"""Names of earlier versions and of bitsandbytes that this version lacks, with replacements, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

_CAST = "cast the parameters yourself, in five lines (docs/options.md, section Casting a model)"

#: Attributes of the module shardopt, or subcommands of its console command.
NAMES = {
    "cast_model": _CAST,
    "is_norm": _CAST,
    "check_numerics": "compare weights before and after an update of the learning rate (docs/troubleshooting.md)",
    "qk_clip_": "multiply the weights of queries and keys in place, after the step, from your own kernel's logits",
    "convert": "load the file with torch.load, torch.distributed.checkpoint or safetensors and pass its state to "
    "shardopt.checkpoint.import_state; shardopt.checkpoint.load(convert=True) changes codec and block size",
}

#: Options of optimizers.
OPTIONS = {
    "device_state_budget": "give the parameters whose state is to stay on the device a param group with offload=None",
    "exact_cut_blocks": "ranks always agree on the scales of blocks that they share; leave the option out",
    "ns_method": "the Newton-Schulz iteration is always the standard one; leave the option out",
    "orthogonalize_memory": "it is always 512 MiB; leave the option out",
    "pin_memory": "the host's memory is always pinned for parameters on a GPU; leave the option out",
    "share_replicas": "every replica computes all of its matrices; leave the option out",
}

#: Options of quantize_state.
QUANTIZE_STATE_OPTIONS = {
    "offload": "use one of shardopt's own optimizers, which have offload=; leave the option out",
    "working_memory": "a step always decodes the state of one parameter at a time; leave the option out",
}


#: Arguments of bitsandbytes' optimizers.
BITSANDBYTES_OPTIONS = {
    "block_wise": "state is always quantized in blocks; leave the option out",
    "is_paged": 'use offload="state"',
    "min_8bit_size": "use min_quantized_numel",
    "optim_bits": "AdamW8bit has 8-bit state, AdamW float32 state",
    "percentile_clipping": "clip with torch.nn.utils.clip_grad_norm_; leave the option out",
}

#: Classes of bitsandbytes that shardopt does not have. The Adam there decays weights as AdamW does, by default by 0.
BITSANDBYTES_CLASSES = {
    f"{paged}{rule}{bits}": f"use {'AdamW' if rule == 'Adam' else rule}{bits.replace('32bit', '')}"
    + (", weight_decay=0" if rule == "Adam" else "")
    + (', offload="state"' if paged else "")
    for rule in ("Adam", "AdamW", "AdEMAMix", "Lion", "SGD", "RMSprop", "Adagrad")
    for paged in ("", "Paged")
    for bits in ("", "8bit", "32bit")
    if paged or bits == "32bit"
}


def explain_removed(names: Iterable[str]) -> str:
    """Text to append to an error message: for each given name that shardopt lacks and knows, what to use instead."""
    texts = {name: f"was removed: {text}" for name, text in (NAMES | OPTIONS | QUANTIZE_STATE_OPTIONS).items()}
    of_bitsandbytes = BITSANDBYTES_OPTIONS | BITSANDBYTES_CLASSES
    texts |= {name: f"is of bitsandbytes: {text}" for name, text in of_bitsandbytes.items()}
    return "".join(f"; {name} {texts[name]}" for name in sorted(names) if name in texts)
