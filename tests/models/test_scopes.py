"""The documentation of the scopes says what the table says."""

from pathlib import Path

from lipscope.models.scopes import SCOPES


def test_the_page_holds_every_scope_as_the_table_has_it():
    page = (Path(__file__).parents[2] / "docs" / "scopes.md").read_text()
    for name, scope in SCOPES.items():
        assert f"| `{name}` | `{scope.formula}` | {scope.description} |" in page
