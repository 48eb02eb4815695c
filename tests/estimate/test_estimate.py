"""The estimate is what a real run takes, byte for byte; its table, its files and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estimate_problem import RULE_OF, both, host_bytes, run
from ranks.offload import offload_from_cpu
from ranks.shaped import SMALL, small_model
from shardopt.__main__ import main
from shardopt.estimate import Model, Setup, estimate, model_of_config
from shardopt.estimate.table import ladder
from shardopt.report import MemoryReport

CHUNK = 1 << 17

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {},
    "bf16+24": {"options": {"master_weight_bits": 24}},
    "bf16+32": {"options": {"master_weight_bits": 32}},
    "fp16+24": {"dtype": "float16", "options": {"master_weight_bits": 24}},
}


def compare(model: Model, setup: Setup) -> MemoryReport:
    with offload_from_cpu(CHUNK):
        expected = estimate(model, setup)
        optimizer, report = run(model, setup)
        measured, estimated = both(report), both(expected)
        if setup.release_gradients and setup.options.get("offload") == "step":  # how many wait depends on the thread
            assert 2 * model.largest <= measured.pop("gradients") <= estimated.pop("gradients")
        assert estimated == measured
        buffers = expected.host.offload_buffers
        assert expected.host.total - buffers == host_bytes(optimizer)
        assert bool(buffers) == (setup.options.get("offload") == "step" and host_bytes(optimizer) > 0)
    return expected


@pytest.mark.parametrize(
    ("weights", "codec", "release", "offload"),
    [
        ("fp32", "log8", False, None),
        ("fp32", "companded8", True, "step"),
        ("fp32", "fp32", False, "state"),
        ("bf16", "log8", False, None),
        ("bf16", "companded8", True, "state"),
        ("bf16", "fp32", False, "step"),
        ("bf16+24", "log8", True, None),
        ("bf16+24", "companded8", False, "state"),
        ("bf16+24", "fp32", False, "step"),
        ("bf16+32", "log8", True, "step"),
        ("bf16+32", "companded8", False, None),
        ("bf16+32", "fp32", False, "state"),
        ("fp16+24", "log8", False, "state"),
        ("fp16+24", "companded8", False, "step"),
        ("fp16+24", "fp32", True, None),
    ],
)
def test_as_a_real_run(weights: str, codec: str, release: bool, offload: str | None) -> None:
    case = WEIGHTS[weights]
    options = {**case.get("options", {}), "codec": codec, "offload": offload}
    compare(small_model(), Setup(**{**case, "release_gradients": release, "options": options}))


@pytest.mark.parametrize("waiting", [1, 4, 9])
def test_gradients_that_wait_for_the_cpu(waiting: int) -> None:
    """The estimate counts the most gradients that wait when the stepping thread is slow."""
    options = {"offload": "step"}
    model, setup = small_model(), Setup(release_gradients=True, waiting_gradients=waiting, options=options)
    with offload_from_cpu(CHUNK):
        _, report = run(model, setup, hold=waiting + 1)
    assert estimate(model, setup).device.gradients == report.host.gradients


@pytest.mark.parametrize("optimizer", RULE_OF)
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "dynamic8"},
        {"codec": "bf16"},
        {"block_size": 32},
        {"min_quantized_numel": 100_000},
        {"offload": "state", "device_state_budget": "300KiB"},
        {"offload": "step", "device_state_budget": "300KiB", "master_weight_bits": 24},
        {"offload": "state", "device_state_budget": "1GiB"},
    ],
    ids=str,
)
def test_other_options(optimizer: str, options: dict[str, Any]) -> None:
    report = compare(small_model(), Setup(optimizer=optimizer, options=options))
    if options.get("device_state_budget") == "300KiB":
        assert report.host.total > 0
        assert report.device.state > 1000, "some state stays"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_positions": 50, "vocab_size": 301},
        {"model_type": "mixtral", "num_local_experts": 3},
        {"model_type": "gemma3_text", "head_dim": 24},
    ],
    ids=lambda config: config["model_type"],
)
def test_other_models(config: dict[str, Any]) -> None:
    compare(small_model(**config), Setup())


@pytest.mark.parametrize("config", [{}, {"model_type": "gemma"}], ids=["own head", "tied"])
def test_a_stable_embedding(config: dict[str, Any]) -> None:
    """A stable embedding and its norm keep float32 moments."""
    stable = compare(small_model(stable_embedding=True, **config), Setup())
    plain = compare(small_model(**config), Setup())
    numel, width = 1001 * 160, 160
    saved = 2 * numel + 1001 * 2 * (4 + 8)  # codes, and the scales of two blocks per row
    assert stable.numel == plain.numel + 2 * width
    grown = stable.device.state + stable.device.scales - plain.device.state - plain.device.scales
    assert grown == 8 * numel - saved + 2 * (8 * width + 4)


def test_stable_embedding_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    states = []
    for arguments in ([], ["--stable-embedding"]):
        assert main(["estimate", "--config", str(path), "--json", *arguments]) == 0
        values = json.loads(capsys.readouterr().out)
        states.append(values["rows"][1]["gpu_bytes"]["state"])
    assert states[1] - states[0] == 6 * 1001 * 160 + 2 * (8 * 160 + 4)


def test_the_ladder() -> None:
    """The bytes per parameter that the README states; the last is weights and a buffer of fixed size."""
    model = Model.of_size("100B")
    totals = [row.report.device.total / model.numel for row in ladder(model)]
    assert [round(total, 2) for total in totals] == [16.0, 10.09, 7.09, 5.09, 2.0]
    smaller = ladder(Model.of_size("7B"))
    *_, released, offloaded = smaller
    assert offloaded.report.device.offload_buffers == 3 * 32 * 2**20
    gradient, steps = 2 * 4096 * 4096, 4 * len(smaller[0].model.parameters)
    assert offloaded.report.device.total == 2 * offloaded.model.numel + gradient + 3 * 32 * 2**20 + steps
    assert released.report.device.gradients == gradient


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}, 6_738_415_616),
        ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 8_030_261_248),
        ({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}, 7_241_732_096),
        ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8},
         46_702_792_704),
        ({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
          "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}, 7_615_616_512),
        ({"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}, 8_190_735_360),
        ({"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
          "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 256000}, 8_537_680_896),
        ({"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
          "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000}, 9_241_705_984),
        ({"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
          "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}, 999_885_952),
        ({"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
    ],
    ids=["llama 2", "llama 3", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2"],
)  # fmt: skip
def test_published_numbers_of_parameters(tmp_path: Path, config: dict[str, Any], numel: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_of_config(path).numel == numel


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


@pytest.mark.parametrize("size", ["big", "-7B", "0", "100", "7 apples", "1e30", "nan", "7GB"])
def test_bad_sizes(capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert f"got '{size}', expected a number of parameters" in failure(capsys, "--", size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got no JSON"),
        ("[1]", "got a list, expected a Hugging Face config.json"),
        ('{"model_type": "mamba"}', "got model_type 'mamba', expected one of llama, "),
        (json.dumps({**SMALL, "hidden_size": "160"}), "got hidden_size='160', expected a whole number above 0"),
        (json.dumps({**SMALL, "vocab_size": True}), "got vocab_size=True, expected a whole number"),
        (json.dumps({**SMALL, "tie_word_embeddings": 1}), "got tie_word_embeddings=1, expected true or false"),
        *(
            (
                json.dumps({key: value for key, value in SMALL.items() if key != left_out}),
                f"got a config without {left_out}, ",
            )
            for left_out in SMALL
            if left_out not in ("model_type", "num_key_value_heads")
        ),
        (json.dumps({**SMALL, "num_attention_heads": 1000}), "got num_attention_heads=1000 for hidden_size="),
        ('{"n_embd": 64, "vocab_size": 5}', "got a config without n_positions or max_position_embeddings"),
    ],
)
def test_bad_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert message in failure(capsys, "--config", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got neither of a size and --config"),
        (["7B", "--config", "x"], "got both of a size and --config"),
        (["--config", "/nowhere/config.json"], "No such file"),
        (["7B", "--backend", "deepspeed"], "got 'deepspeed', expected one of single, ddp, fsdp2"),
        (["7B", "--world-size", "2"], "got 'single' with 2 ranks, expected one of ddp"),
        (["7B", "--backend", "ddp", "--world-size", "0"], "got 0, expected at least 1"),
        (["7B", "--waiting-gradients", "0"], "waiting_gradients: got 0, expected at least 1"),
        (["7B", "--backend", "fsdp1", "--release-gradients"], "got True with fsdp1"),
        (["7B", "--backend", "fsdp1", "--offload", "step"], "got 'step' with fsdp1"),
        (["7B", "--backend", "zero2", "--release-gradients"], "got True with zero2"),
        (["7B", "--optimizer", "prodigy", "--release-gradients"], "got Prodigy, whose step needs sums over all"),
        (["7B", "--optimizer", "muon", "--offload", "step"], "offload: got 'step' for Muon"),
        (
            ["7B", "--backend", "zero2", "--offload", "state"],
            "offload: got 'state' with zero2, which",
        ),
        (["7B", "--backend", "zero3", "--dtype", "float16"], "dtype: got 'float16' with zero3"),
        (["7B", "--backend", "zero1", "--zero-offload", "all"], "zero_offload: got 'all' with zero1"),
        (["7B", "--backend", "fsdp2", "--zero-offload", "optimizer"], "zero_offload: got 'optimizer' with fsdp2"),
        (["7B", "--zero-offload", "nvme"], "invalid choice: 'nvme'"),
        (["7B", "--block-size", "100"], "block_size: got 100, expected a power of two"),
        (["7B", "--device-state-budget", "2GB"], "device_state_budget: got '2GB', expected bytes"),
        (["7B", "--device-state-budget", "2GiB"], "device_state_budget: got '2GiB' without offload"),
        (
            ["7B", "--waiting-gradients", "8", "--release-gradients"],
            "waiting_gradients: got 8 without release_gradients",
        ),
        (["7B", "--waiting-gradients", "8", "--offload", "step"], "waiting_gradients: got 8 without release_gradients"),
        (["7B", "--codec", "nf4"], "invalid choice: 'nf4'"),
        (["7B", "--stable-embedding"], "--stable-embedding: got it with the size 7B"),
        (["7B", "--colour"], "unrecognized arguments"),
        (["7B", "--chart", "/nowhere/chart.png"], "No such file"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    if "--chart" in arguments:
        pytest.importorskip("matplotlib")
    assert message in failure(capsys, *arguments)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "70B"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("70B: 70,000,001,024 parameters")
    assert " ".join(head.split()) == (
        "weights gradients state scales master weights offload buffers total GiB per GPU GiB per host"
    )
    rows = lines[: lines.index("")]
    figures = [[float(cell) for cell in line.split()[-9:]] for line in rows]
    assert [row[6] for row in figures] == [16.0, 10.09, 7.09, 5.09, 2.0]
    assert figures[0] == [4, 4, 8, 0, 0, 0, 16, round(16 * 70e9 / 2**30, 2), 0]
    assert figures[4][:3] == [2, 0, 0]
    assert figures[4][8] == round(3.09375 * 70e9 / 2**30, 2)
    assert any("activations" in line for line in lines)


def test_what_muon_takes_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer, is_said in (("adamw", False), ("muon", True), ("normuon8bit", True)):
        assert main(["estimate", "8B", "--optimizer", optimizer]) == 0
        assert ("a step takes 512 MiB on top" in capsys.readouterr().out) is is_said


def test_asked_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Options add a row; per host it is what all its ranks have there."""
    size = str(2**32)
    assert main(["estimate", size, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    command = ["estimate", size, "--json", "--backend", "fsdp2", "--world-size", "16", "--gpus-per-node", "4"]
    assert main([*command, "--offload", "state", "--master-weight-bits", "32", "--device-state-budget", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(plain["rows"]) == 5
    assert found["rows"][:5] == plain["rows"]
    (row,) = found["rows"][5:]
    assert row["name"] == "adamw8bit bf16+32 offload=state fsdp2 x 16"
    assert row["gpu_bytes_per_parameter"]["parameters"] == 2 / 16
    assert row["gib_per_host"] == pytest.approx(4 * sum(row["host_bytes_per_gpu"].values()) / 2**30)
    assert sum(row["host_bytes_per_gpu"].values()) == (2 + 2 + 0.09375) * 2**32 / 16
    assert any("layers are units" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("backend", "offload", "totals"),
    [
        ("zero1", "none", [10.09, 12.09, 8.09, 7.09]),
        ("zero2", "none", [10.09, 12.09, 8.09, 7.09]),
        ("zero2", "optimizer", [(4, 10.09), (2, 12.09), (2, 8.09), (2, 7.09)]),
        ("zero3", "none", [14.09, 14.09, 10.09, 9.09]),
        ("zero3", "optimizer", [(4, 10.09), (2, 12.09), (2, 8.09), (2, 7.09)]),
        ("zero3", "all", [(0, 10.09), (0, 14.09), (0, 8.09), (0, 7.09)]),
    ],
)
def test_deepspeed(backend: str, offload: str, totals: list[Any]) -> None:
    """The README's bytes per owned parameter on GPU and host, as measured."""
    model = Model.of_size("1B")
    for weights, total in zip(("fp32", "bf16", "bf16+32", "bf16+24"), totals, strict=True):
        report = estimate(model, Setup(backend=backend, zero_offload=offload, **WEIGHTS[weights]))
        got = [round(use.total / model.numel, 2) for use in (report.device, report.host)]
        assert got == list(total if isinstance(total, tuple) else (total, 0)), weights


def test_deepspeed_row(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", str(2**32), "--json", "--backend", "zero2", "--world-size", "16", "--gpus-per-node", "4"]
    assert main([*command, "--zero-offload", "optimizer"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = found["rows"][5]
    assert row["name"] == "adamw8bit bf16+fp32 zero_offload=optimizer zero2 x 16"
    assert row["gpu_bytes_per_parameter"]["total"] == 2
    assert sum(row["host_bytes_per_gpu"].values()) == (4 + 4 + 2 + 2 + 0.09375) * 2**32 / 16 + 4
    assert row["gib_per_host"] == pytest.approx(4 * sum(row["host_bytes_per_gpu"].values()) / 2**30)
    assert any("Its buckets" in note for note in found["notes"])


def test_short_names_of_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for dtype in ("bf16", "bfloat16", "fp32"):
        assert main(["estimate", "7B", "--dtype", dtype]) == 0
        rows.append(capsys.readouterr().out)
    assert rows[0] == rows[1] != rows[2]


def test_options_are_not_taken_for_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """One that says what is so anyway asks for a row, too."""
    for arguments, codec in ((["--codec", "log8"], " log8"), (["--offload", "none"], ""), (["--world-size", "1"], "")):
        main(["estimate", "7B", "--json", *arguments])
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert rows[5]["name"] == f"adamw8bit{codec} bf16 single"
        assert round(rows[5]["gpu_bytes_per_parameter"]["total"], 2) == 6.09


def test_master_weights_of_float32(capsys: pytest.CaptureFixture[str]) -> None:
    """Ignored, as the optimizer does: it has all bits anyway."""
    main(["estimate", "7B", "--json", "--dtype", "float32", "--master-weight-bits", "24"])
    row = json.loads(capsys.readouterr().out)["rows"][5]
    assert row["name"] == "adamw8bit fp32 single"
    assert row["gpu_bytes_per_parameter"]["master_weights"] == 0


def test_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    assert main(["estimate", "7B", "--offload", "step", "--chart", str(tmp_path / "chart.png")]) == 0
    assert capsys.readouterr().out
    pixels = imread(tmp_path / "chart.png")
    assert pixels.shape[0] > 400
    assert pixels[..., :3].std() > 0.05, "it is not a blank page"


def test_chart_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'shardopt[plot]'" in failure(capsys, "7B", "--chart", str(tmp_path / "chart.png"))
    assert not list(tmp_path.iterdir())


def test_console_command(tmp_path: Path) -> None:
    """As a module, in a process of its own: without a process group, and without matplotlib being imported."""
    code = """if True:
        import runpy, sys
        import torch.distributed
        try:
            runpy.run_module("shardopt", run_name="__main__", alter_sys=True)
        finally:
            assert "matplotlib" not in sys.modules
            assert not torch.distributed.is_initialized()
    """
    command = [sys.executable, "-c", code, "estimate", "7B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8-bit state, fp32 weights" in done.stdout
    scripts = re.search(r"\[project\.scripts\]\n(.*)\n", (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert scripts is not None
    assert scripts[1] == 'shardopt = "shardopt.__main__:main"'
