"""Language models on windows of text, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm import data
from quality.task import Problem, device_of


class TextProblem(Problem):
    """Next-token loss on windows that seed and step choose.

    Args:
        corpus: training and held-out tokens.
        make: (seed) -> model from tokens, int64 (windows, context), to logits.
        context: tokens per window.
        batch: windows per step.
        heldout_windows: held-out windows, evenly spread.
        fingerprint: digest of the corpus, and of whatever else the model is made of.
    """

    def __init__(
        self,
        corpus: data.Corpus,
        make: Callable[[int], nn.Module],
        context: int,
        batch: int,
        heldout_windows: int,
        fingerprint: str,
    ) -> None:
        self.corpus, self.fingerprint = corpus, fingerprint
        self._make, self._context, self._batch = make, context, batch
        self._heldout = data.heldout_offsets(corpus, context, heldout_windows)

    def model(self, seed: int) -> nn.Module:
        return self._make(seed)

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        offsets = data.train_offsets(self.corpus, self._context, self._batch, seed, step)
        return self._loss(model, *data.windows(self.corpus.train, offsets, self._context))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        total = 0.0
        for first in range(0, len(self._heldout), 4 * self._batch):
            part = self._heldout[first : first + 4 * self._batch]
            total += len(part) * float(self._loss(model, *data.windows(self.corpus.heldout, part, self._context)))
        return total / len(self._heldout)

    @staticmethod
    def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        device = device_of(model)
        logits = model(inputs.to(device))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
