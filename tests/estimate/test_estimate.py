"""The estimate is what a real run takes, within 1%; its table and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from estimate_problem import TOKENS, Layers, assert_near, both, estimated_model
from needed import needs
from ranks.offload import offload_from_cpu
from shardopt.__main__ import main
from shardopt.estimate import Model, Setup, estimate
from shardopt.estimate.cli import default_rows
from shardopt.estimate.ledger import DTYPES, OPTIMIZERS

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {},
    "bf16+24": {"options": {"master_weight_bits": 24}},
    "bf16+32": {"options": {"master_weight_bits": 32}},
}


@pytest.mark.parametrize(
    ("optimizer", "weights", "options"),
    [
        ("adamw8bit", "fp32", {"codec": "companded8"}),
        ("sgd8bit", "bf16", {"codec": "dynamic8", "offload": "state"}),
        ("adamw8bit", "bf16+24", {"codec": "log8"}),
        ("adamw8bit", "bf16+24", {"codec": "fp32", "offload": "step"}),
        ("sgd8bit", "bf16+32", {"block_size": 32, "min_quantized_numel": 150_000}),
    ],
)
def test_as_a_real_run(optimizer: str, weights: str, options: dict[str, Any]) -> None:
    case = WEIGHTS[weights]
    setup = Setup(**{**case, "optimizer": optimizer, "options": {**case.get("options", {}), **options}})
    net = Layers().to(DTYPES[setup.dtype])
    with offload_from_cpu(1 << 17):
        ours = OPTIMIZERS[optimizer](net.parameters(), **setup.options)
        net(TOKENS).backward()
        ours.step()
        ours.synchronize()
        actual = both(shardopt.memory_report(ours))
    expected = estimate(estimated_model(), setup)
    assert expected.host.offload_buffers == (96 << 20 if options.get("offload") == "step" else 0)
    assert (expected.host.state > 0) == ("offload" in options)
    kinds = both(expected)
    for of in (actual, kinds):  # of chunks of another size here
        of.pop("offload_buffers")
    assert_near(actual, kinds)


def test_a_module_says_what_keeps_float32_and_what_are_layers() -> None:
    """A StableEmbedding and its norm keep float32 moments."""
    net = torch.nn.Sequential(shardopt.StableEmbedding(1001, 160), torch.nn.Linear(160, 1001, bias=False))
    model = Model.of("stable", net)
    assert [parameter.float32_state for parameter in model.parameters] == [True, False, False, False]
    assert [parameter.unit for parameter in model.parameters] == ["0", "0", "0", "1"]
    assert model.embeddings == {(1001, 160)}
    use = estimate(model, Setup()).device
    numel = 1001 * 160
    assert use.state == 8 * numel + 8 * 320 + 2 * numel + 4 * 4
    assert {parameter.unit for parameter in estimated_model().parameters} == {"", "layers.0", "layers.1", "layers.2"}


def test_released_and_offloaded() -> None:
    """The last of the default rows: the largest gradient, and a buffer of fixed size."""
    model = Model.of_size("7B")
    *_, released, offloaded = (estimate(model, setup).device for setup in default_rows().values())
    gradient = 2 * 4096 * 4096
    assert released.gradients == gradient
    assert offloaded.total == 2 * model.numel + gradient + 3 * 32 * 2**20


@needs("transformers")
@pytest.mark.parametrize(
    ("config", "numel"),
    [
        ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 8_030_261_248),
        ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8},
         46_702_792_704),
        ({"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
          "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000}, 9_241_705_984),
    ],
    ids=["grouped queries", "experts", "tied embeddings"],
)  # fmt: skip
def test_published_numbers_of_parameters(tmp_path: Path, config: dict[str, Any], numel: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert Model.of_config(path).numel == numel
    path.write_text('{"model_type": "clip"}')  # of which transformers' message lists all models
    with pytest.raises(ValueError, match=r"config.json: got Unrecognized [^\n]*, expected a causal LM's config$"):
        Model.of_config(path)


@pytest.mark.parametrize(
    ("text", "numel"), [("125M", 125e6), ("7B", 7e9), ("1.3e9", 1.3e9), ("0.5t", 5e11), ("4096", 4096)]
)
def test_sizes(text: str, numel: float) -> None:
    model = Model.of_size(text)
    assert abs(model.numel - numel) <= 2048
    assert all(len(shape) == 2 and shape[1] % 4096 == 0 for shape, *_ in model.parameters)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command's message when it refuses."""
    with pytest.raises(SystemExit) as exit_:
        main(["estimate", *arguments])
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((["--", size], f"got '{size}', expected a number of parameters") for size in ("big", "-7B")),
        ([], "got neither or both of a size and --config"),
        (["7B", "--config", "x"], "got neither or both of a size and --config"),
        pytest.param(
            ["--config", "/nowhere/config.json"], "/nowhere/config.json: there is no", marks=needs("transformers")
        ),
        (["7B", "--backend", "deepspeed"], "got 'deepspeed', expected one of single, ddp, fsdp2"),
        (["7B", "--world-size", "2"], "got 'single' with 2 ranks, expected ddp"),
        (["7B", "--backend", "ddp", "--world-size", "0"], "got 0, expected at least 1"),
        (["7B", "--backend", "fsdp1", "--release-gradients"], "got True with fsdp1"),
        (["7B", "--optimizer", "prodigy", "--release-gradients"], "got Prodigy, whose step needs sums over all"),
        (["7B", "--optimizer", "muon", "--offload", "step"], "offload: got 'step' for Muon"),
        (["7B", "--backend", "zero2", "--offload", "state"], "offload: got 'state' with zero2, expected zero_offload"),
        (["7B", "--backend", "zero1", "--zero-offload", "all"], "zero_offload: got 'all' with zero1"),
        (["7B", "--backend", "fsdp2", "--zero-offload", "optimizer"], "zero_offload: got 'optimizer' with fsdp2"),
        (["7B", "--block-size", "100"], "block_size: got 100, expected a power of two"),
        (["7B", "--colour"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in failure(capsys, *arguments)


def test_without_transformers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in failure(capsys, "--config", "config.json")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "7B"]) == 0
    assert not torch.distributed.is_initialized()
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.scripts]\nshardopt = "shardopt.__main__:main"\n' in project
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "7B: 6,999,998,464 parameters"
    assert " ".join(head.split()) == (
        "weights gradients state scales master weights offload buffers total GiB per GPU GiB per host"
    )
    rows = lines[: lines.index("")]
    figures = [[float(cell) for cell in line.split()[-9:]] for line in rows]
    assert [row[6] for row in figures] == [16.0, 10.09, 7.09, 5.1, 2.02]
    assert figures[0] == [4, 4, 8, 0, 0, 0, 16, round(16 * 7e9 / 2**30, 2), 0]
    assert figures[4][8] == round(3.09375 * 7e9 / 2**30, 2)
    assert any("activations" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "name", "gib"),
    [
        (
            "--backend fsdp2 --world-size 16 --gpus-per-node 4 --offload state --master-weight-bits 32",
            "adamw8bit bfloat16 fsdp2 x 16 gpus_per_node=4 master_weight_bits=32 offload=state",
            ((2 + 2) / 4 + 96 / 1024, 4 * (2 + 2 + 0.09375) / 4),
        ),
        (
            "--backend zero2 --world-size 16 --zero-offload optimizer",
            "adamw8bit bfloat16 zero2 x 16 zero_offload=optimizer",
            (2 * 4, 8 * (4 + 4 + 2 + 2 + 0.09375) / 4),
        ),
        ("--dtype fp32 --master-weight-bits 24", "adamw8bit float32 single master_weight_bits=24", (10.09375 * 4, 0)),
    ],
)
def test_asked_row(capsys: pytest.CaptureFixture[str], arguments: str, name: str, gib: tuple[float, float]) -> None:
    """Options add a row, of 2^32 parameters here; per host it is what all its ranks have there."""
    assert main(["estimate", str(2**32), *arguments.split()]) == 0
    row = capsys.readouterr().out.splitlines()[7]
    assert row.startswith(name + " ")
    assert [float(cell) for cell in row.split()[-2:]] == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(
    ("backend", "offload", "totals"),
    [
        ("zero1", "none", [10.09, 12.09, 8.09, 7.09]),
        ("zero2", "optimizer", [(4, 10.09), (2, 12.09), (2, 8.09), (2, 7.09)]),
        ("zero3", "none", [14.09, 14.09, 10.09, 9.09]),
        ("zero3", "optimizer", [(4, 10.09), (2, 12.09), (2, 8.09), (2, 7.09)]),
        ("zero3", "all", [(0, 10.09), (0, 14.09), (0, 8.09), (0, 7.09)]),
    ],
)
def test_deepspeed(backend: str, offload: str, totals: list[Any]) -> None:
    """Bytes per owned parameter on GPU and host, as once measured for each stage and offload."""
    model = Model.of_size("1B")
    for weights, total in zip(("fp32", "bf16", "bf16+32", "bf16+24"), totals, strict=True):
        report = estimate(model, Setup(backend=backend, zero_offload=offload, **WEIGHTS[weights]))
        got = [round(use.total / model.numel, 2) for use in (report.device, report.host)]
        assert got == list(total if isinstance(total, tuple) else (total, 0)), weights
