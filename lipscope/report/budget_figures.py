"""Charts of error budgets: where in a model the error of each format comes from."""

from __future__ import annotations

from typing import Any

from lipscope.budget.result import ErrorBudget


def layer_errors(budget: ErrorBudget, ax: Any = None) -> Any:
    """Error that each layer causes at the output, one line per format; returns the Axes."""
    import matplotlib.pyplot as plt

    ax = plt.subplots(layout="constrained")[1] if ax is None else ax
    for name in budget.formats:
        total = budget.total(name).value
        shares = {k: v for k, v in budget.shares(name).items() if k is not None}
        layers = sorted(shares)
        # Squared errors add up, so a share of the square is a factor sqrt(share) of the error; a
        # divergence is a square already.
        power = 1.0 if budget.metric == "kl" else 0.5
        (line,) = ax.plot(layers, [total * shares[i] ** power for i in layers], "o-", label=name)
        if name in budget.observed:
            ax.axhline(budget.observed[name], color=line.get_color(), linestyle=":")
    ax.set_yscale("log")
    ax.set_xlabel("layer")
    unit = "nats per token" if budget.metric == "kl" else "relative error of the output"
    ax.set_ylabel(unit)
    ax.set_title("Predicted error by layer; dotted: observed, all layers together")
    ax.legend()
    return ax
