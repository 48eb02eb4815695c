"""The pieces of the training job: the transformer, the text, the options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lm import data, metrics, model, options, training
from lm.errors import UserError
from lm.model import ModelConfig
from train_job import write_text

CONTEXT = 16


def make() -> model.Transformer:
    return model.build(ModelConfig(dim=32, layers=2, heads=4), CONTEXT, 0, torch.float32)


def test_a_later_byte_changes_no_earlier_logits() -> None:
    network = make()
    tokens = torch.randint(256, (2, CONTEXT))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = network(tokens), network(changed)
    assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_split_goes_by_file_and_by_its_path_alone(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "text", files=30)
    corpus = data.load(str(folder), 0.3)
    parts = [set(text.tobytes().split(b"\0")) - {b""} for text in (corpus.train, corpus.heldout)]
    assert parts[0] | parts[1] == {path.read_bytes() for path in folder.rglob("*.txt")}
    assert not parts[0] & parts[1]
    assert 1 <= len(parts[1]) <= 20
    (folder / "another.txt").write_text("more")
    again = data.load(str(folder), 0.3)
    assert parts[1] <= set(again.heldout.tobytes().split(b"\0"))


def test_learning_rate_rises_then_follows_a_cosine() -> None:
    config = options.Config(steps=100, warmup=10, min_lr=0.1)
    factors = [training.lr_factor(step, config) for step in range(1, 101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1
    assert factors[54] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[9:] == sorted(factors[9:], reverse=True)


def test_command_line_wins_over_yaml_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 300\nlr: 1e-4\nordered: true\ndata: text\noptions: {betas: [0.9, 0.95], codec: bf16}\n")
    argv = ["--config", str(path), "--steps", "200", "--no-ordered", "--options", "codec=log4", "eps=1e-6"]
    found = options.load(argv)
    assert (found.steps, found.lr, found.ordered, found.data) == (200, 1e-4, False, "text")
    assert found.options == {"betas": [0.9, 0.95], "codec": "log4", "eps": 1e-6}
    assert found.batch == options.Config().batch
    assert options.load([]) == options.Config()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("step: 3", "unknown option 'step'"),
        ("ordered: 1", "ordered: got '1', expected true or false"),
        ("lr: .nan", "lr: got nan, expected at least 0"),
        ("backend: deepspeed", "go together"),
        ("[1, 2]", "got list, expected names with values"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint):
        options.load(["--config", str(path)])


def test_metrics_of_a_resumed_run_go_on_where_it_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics.begin(path, 2)
    metrics.append(path, {"step": 3, "train_loss": float("nan")})
    assert metrics.read(path) == [{"step": 1}, {"step": 2}, {"step": 3, "train_loss": None}]
