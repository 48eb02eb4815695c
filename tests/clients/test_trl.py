"""TRL's SFTTrainer, which is Hugging Face's Trainer with data of its own."""

from __future__ import annotations

from pathlib import Path

from hugging_face import fine_tuned
from needed import needs
from ranks.pool import Pool

pytestmark = needs("trl")


def test_sft_trainer(client_ranks: Pool, tmp_path: Path) -> None:
    """Learns one text, by FSDP2 with the bits of one process."""
    (losses, state), _ = client_ranks.run(2, fine_tuned, "fsdp2", tmp_path)
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert any(name.endswith("exp_avg_sq_codes") for name in state)
    assert client_ranks.run(1, fine_tuned, "plain", tmp_path)[0][1] == state
