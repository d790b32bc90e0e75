"""What a notebook shows of a study and of an estimate."""

import torch

from lipscope.linalg.local import local_lipschitz
from tests.report.made import HOSTILE, failed, grid, study


def test_a_study_shows_its_headline_and_its_maps(tmp_path):
    text = study(tmp_path / "s", grid())._repr_html_()
    assert text.count("<tr>") == 1 + 4 and "0.50 [0.38, 0.62]" in text and "fake/model" in text


def test_a_study_of_strangers_is_text(tmp_path):
    text = study(tmp_path / "s", [failed()], model=HOSTILE[0])._repr_html_()
    assert "<script" not in text and "Without a value: 1 row." in text


def test_an_estimate_shows_a_line_per_member():
    X = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = local_lipschitz(lambda x: 2 * x, X)
    assert batch._repr_html_().count("<tr>") == 1 + 3
    one = local_lipschitz(lambda x: 2 * x, X[0])
    assert "<td>2</td>" in one._repr_html_()
    assert (
        one._repr_html_().count("<tr>") == 1 + 1
        and f"<td>{one.status.name.lower()}</td>" in one._repr_html_()
    )
