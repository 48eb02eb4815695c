"""The table of factors: for each operation, the factors that keep outputs and gradients at std 1 for inputs of std 1.

Functions return the output's factor, then one per input's gradient, then one for the parameters' gradients. Gradients
of inputs must carry the output's factor (``constrained``), or the whole gradient changes its direction: gradients that
reach a tensor over one path would be scaled otherwise than over another. Gradients that reach a tensor over one path
only (parameters, the readout's input, the loss's input) have factors of their own. Formulas of nonlinear operations are
the empirical ones of arXiv 2407.17465, appendix B, and of the package unit-scaling.
"""

from __future__ import annotations

from math import exp, log, pi, sqrt


def _between(share: float, low: float, high: float) -> float:
    """Interpolates in logarithms: ``low ** (1 - share) * high ** share``."""
    return exp(share * log(high) + (1 - share) * log(low))


def linear(inputs: int, outputs: int, tokens: float, constrained: bool = True) -> tuple[float, float, float]:
    """Output, input, parameters; of a weight ``(outputs, inputs)`` and ``tokens`` rows of input."""
    output = inputs**-0.5
    return output, output if constrained else outputs**-0.5, 1 / sqrt(tokens or 1)


def readout(inputs: int, outputs: int, tokens: float) -> tuple[float, float, float]:
    """Output, input, parameters; of the last layer, whose outputs have std ``inputs ** -0.5`` at first (muP)."""
    return 1 / inputs, outputs**-0.5, 1 / sqrt(tokens or 1)


def matmul(rows: int, inner: int, columns: int, constrained: bool = True) -> tuple[float, float, float]:
    """Output, left, right; of ``(rows, inner) @ (inner, columns)``."""
    output = inner**-0.5
    return (output, output, output) if constrained else (output, columns**-0.5, rows**-0.5)


def gelu(mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Output, input; of ``gelu(mult x) / mult``."""
    share = 1 / (1 + 0.25 / mult**2)
    output = _between(share, 2, sqrt(2 / (1 - 1 / pi)))
    return output, output if constrained else _between(share, 2, sqrt(2))


def silu(mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Output, input; of ``x sigmoid(mult x)``."""
    output = _between(1 / (1 + 0.25 / mult**2), 2, sqrt(2 / (1 - 1 / pi)))
    return output, output if constrained else swiglu(mult)


def swiglu(mult: float = 1.0) -> float:
    """Output and both inputs; of ``x gate sigmoid(mult gate)``."""
    return _between(1 / (1 + 1 / mult**2), 2, sqrt(2))


def softmax(entries: int, mult: float = 1.0, constrained: bool = True) -> tuple[float, float]:
    """Output, input; of ``softmax(mult x)`` over ``entries``: between flat and one entry alone."""
    share = 1 / (1 + 4 / mult**2)
    output = _between(share, entries, sqrt(entries))
    return output, output if constrained else _between(share, entries / mult, sqrt(entries / mult))


def attention(positions: int, head_dim: int, causal: bool, mult: float = 1.0, dropout: float = 0.0) -> float:
    """Output, query, key and value; of attention with logits ``mult / head_dim`` times query by key."""
    averaged = (log(positions) if causal and positions > 1 else 1.0) / positions
    return sqrt(1 - dropout) / _between(1 / (1 + 4 * head_dim / mult**2), sqrt(averaged), 1.0)


def query(head_dim: int, mult: float = 1.0) -> float:
    """Gradients of queries and keys; gradients of the projections' inputs have the inverse.

    Attention gives queries and keys of std 1 gradients of std ``mult / sqrt(head_dim)``, because its logits are divided
    by ``head_dim``. These gradients are scaled up where they enter the projections and down where they leave, so that
    their sum with the gradients through the values keeps its direction.
    """
    return max(sqrt(head_dim) / mult, 1.0)


def norm(tokens: float) -> float:
    """Gains and biases; of norms of ``tokens`` rows."""
    return 1 / sqrt(tokens or 1)


def embedding(entries: int, tokens: float) -> float:
    """Entries; of an embedding."""
    return sqrt(entries / (tokens or 1))


def add(left: int, right: int, constrained: bool = True) -> tuple[float, float, float]:
    """Output, left, right; of a sum in which elements of ``left`` and ``right`` are repeated that many times."""
    output = sqrt(0.5)
    return (output, output, output) if constrained else (output, left**-0.5, right**-0.5)


def dropout(p: float) -> float:
    """Output and input; of dropout, which divides the elements that it keeps by 1 - p."""
    return sqrt(1 - p)


def cross_entropy(classes: int) -> float:
    """Logits; of the sum of cross entropies."""
    return classes / sqrt(max(classes - 1, 1))


def mse_loss() -> float:
    """Both inputs; of the sum of squared errors."""
    return sqrt(1 / 8)


def residual(tau: float) -> tuple[float, float]:
    """Branch, skip; of ``(tau f(x) + x) / sqrt(1 + tau^2)``."""
    whole = sqrt(1 + tau**2)
    return tau / whole, 1 / whole


def residual_weights(layers: int, mult: float = 1.0, attention_ratio: float = 1.0) -> tuple[float, ...]:
    """The weights tau of residual layers, attention and MLP in turn, each kind of equal total share (section G).

    Args:
        layers: attention and MLP layers together: twice the blocks.
        mult: share of all layers, relative to the embedding (alpha_res).
        attention_ratio: share of an attention relative to an MLP (rho).
    """
    mlp = mult * sqrt(2 / (1 + attention_ratio**2))
    of_kind = (attention_ratio * mlp, mlp)
    return tuple(
        of_kind[index % 2] / sqrt(layers / 2 + (index + 1) // 2 * of_kind[0] ** 2 + index // 2 * mlp**2)
        for index in range(layers)
    )
