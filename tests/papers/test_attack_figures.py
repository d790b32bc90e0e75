"""The figures of attacks show every attack and curve they are given, with labelled axes."""

import matplotlib
import pytest

from lipscope._types import UserError
from lipscope.papers.attack_comparison import TOKENS, Trial, Trials
from lipscope.papers.attack_figures import LOOKS, adversarial_growth_figure, contest_figure

matplotlib.use("Agg")


def test_the_contest_has_a_line_for_every_attack_at_its_median():
    trials = [
        Trial(text, attack, budget, budget * (1 + text), budget * i, success=budget > 1)
        for text in range(3)
        for i, attack in enumerate(LOOKS, 1)
        for budget in (0.1, 1, 2)
        if attack != TOKENS or budget >= 1
    ]
    left, right = Trials(trials).plot()
    assert [line.get_label() for line in left.get_lines()] == list(LOOKS)
    for i, (line, share) in enumerate(zip(left.get_lines(), right.get_lines(), strict=True), 1):
        budgets = [1, 2] if line.get_label() == TOKENS else [0.1, 1, 2]
        assert line.get_xdata().tolist() == pytest.approx([2 * b for b in budgets])
        assert line.get_ydata().tolist() == pytest.approx([i * b for b in budgets])
        assert share.get_ydata().tolist() == [100 * (b > 1) for b in budgets]
    assert (
        left.get_xscale() == left.get_yscale() == "log"
        and "3 texts" in left.get_xlabel()
        and right.get_ylabel()
    )


def test_the_growth_has_a_curve_for_every_name():
    curves = {"real": {8: 1.0, 16: 1.2}, "bound": {8: 30.0, 16: 42.0, 32: 60.0}}
    (ax,) = adversarial_growth_figure(curves, "a $layer").axes
    names = [line.get_label() for line in ax.get_lines()]
    assert names == ["real", "bound", "slope 1/2"] and ax.get_title() == "a $layer"
    assert (
        ax.get_lines()[1].get_ydata().tolist() == [30.0, 42.0, 60.0]
        and ax.get_xlabel()
        and ax.get_ylabel()
    )


def test_nothing_cannot_be_drawn():
    for draw in (lambda: contest_figure([]), lambda: adversarial_growth_figure({}, "")):
        with pytest.raises(UserError, match="there are no"):
            draw()
