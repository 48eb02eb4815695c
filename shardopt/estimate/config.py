"""The parameters of a language model from its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardopt.estimate.model import Model, Shape


class _Config:
    """A config, whose keys are asked for by name.

    Args:
        values: the file's contents.
        where: the file's name, for errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = values

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0, under the first of these names that there is.

        Raises:
            ValueError: it is something else, or is missing and has no default.
        """
        name = next((name for name in names if self._values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ValueError(
                    f"{self.where}: got a config without {' or '.join(names)}, expected the key; add it, or give the "
                    "number of parameters instead"
                )
            return default
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.where}: got {name}={value!r}, expected a whole number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or False.

        Raises:
            ValueError: it is something else.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: got {name}={value!r}, expected true or false")
        return value


#: Differences between the models that have rotary attention and a gated feed-forward part.
_LLAMA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"experts": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True, "head_dim": 128},
    "gemma": {"tied": True, "head_dim": 256},
    "gemma2": {"tied": True, "head_dim": 256, "norms": 4},
    "gemma3_text": {"tied": True, "head_dim": 256, "norms": 4, "head_norms": True},
}


def _llama(
    config: _Config,
    *,
    experts: bool = False,
    qkv_bias: bool = False,
    head_norms: bool = False,
    head_dim: int | None = None,
    norms: int = 2,
    tied: bool = False,
) -> tuple[list[Shape], list[Shape], int, list[Shape]]:
    """The shapes before the layers, those of a layer, the number of layers, and the shapes behind them."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    inner, vocabulary = config.number("intermediate_size"), config.number("vocab_size")
    width = config.number("head_dim", default=head_dim or hidden // heads)
    if width < 1:
        raise ValueError(
            f"{config.where}: got num_attention_heads={heads} for hidden_size={hidden}, expected no more heads than "
            "that, or head_dim; correct the file"
        )
    queries, keys = heads * width, config.number("num_key_value_heads", default=heads) * width
    all_biased = config.flag("attention_bias", False)
    biased = all_biased or qkv_bias
    attention = [
        *_linear(queries, hidden, biased),
        *_linear(keys, hidden, biased),
        *_linear(keys, hidden, biased),
        *_linear(hidden, queries, all_biased),
    ]
    if head_norms:
        attention += [(width,), (width,)]
    if experts:
        number = config.number("num_local_experts")
        feed_forward: list[Shape] = [(number, hidden), (number, 2 * inner, hidden), (number, hidden, inner)]
    else:
        in_mlp = config.flag("mlp_bias", False)
        feed_forward = [
            *_linear(inner, hidden, in_mlp),
            *_linear(inner, hidden, in_mlp),
            *_linear(hidden, inner, in_mlp),
        ]
    layer = [*attention, *feed_forward, *[(hidden,)] * norms]
    head: list[Shape] = [] if config.flag("tie_word_embeddings", tied) else [(vocabulary, hidden)]
    return [(vocabulary, hidden)], layer, config.number("num_hidden_layers"), [(hidden,), *head]


def _linear(rows: int, cols: int, biased: bool) -> list[Shape]:
    return [(rows, cols), (rows,)] if biased else [(rows, cols)]


def _gpt2(config: _Config) -> tuple[list[Shape], list[Shape], int, list[Shape]]:
    """As :func:`_llama`."""
    hidden, vocabulary = config.number("n_embd", "hidden_size"), config.number("vocab_size")
    inner = config.number("n_inner", "intermediate_size", default=4 * hidden)
    layer: list[Shape] = [(hidden,), (hidden,)]
    layer += [(hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    layer += [(hidden,), (hidden,)]
    layer += [(hidden, inner), (inner,), (inner, hidden), (hidden,)]
    head: list[Shape] = [] if config.flag("tie_word_embeddings", True) else [(vocabulary, hidden)]
    positions = config.number("n_positions", "max_position_embeddings")
    first: list[Shape] = [(vocabulary, hidden), (positions, hidden)]
    return first, layer, config.number("n_layer", "num_hidden_layers"), [(hidden,), (hidden,), *head]


SUPPORTED = (*_LLAMA, "gpt2")


def model_of_config(path: str | Path, *, stable_embedding: bool = False) -> Model:
    """The model that a config.json describes.

    Args:
        path: the file.
        stable_embedding: whether its token embedding is a :class:`shardopt.StableEmbedding`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no config, or of a model that is not known here, or lacks a key.
    """
    where = str(path)
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: got no JSON ({error}), expected a Hugging Face config.json") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: got a {type(values).__name__}, expected a Hugging Face config.json")
    config = _Config(values, where)
    kind = values.get("model_type")
    if kind is None:
        kind = "gpt2" if "n_embd" in values else "mixtral" if "num_local_experts" in values else "llama"
    if kind not in SUPPORTED:
        raise ValueError(
            f"{where}: got model_type {kind!r}, expected one of {', '.join(SUPPORTED)}; give the number of parameters "
            "instead, such as 7B"
        )
    first, layer, count, last = _gpt2(config) if kind == "gpt2" else _llama(config, **_LLAMA[kind])
    model = Model.of_layers(kind, first, [layer] * count, last)
    return model.with_stable_embedding() if stable_embedding else model
