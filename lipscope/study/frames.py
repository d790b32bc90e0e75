"""Records as a pandas DataFrame, which is the only thing that pandas is needed for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lipscope._types import UserError

if TYPE_CHECKING:
    import pandas as pd

WHOLE = ("layer", "head")
"""Columns of integers that may be missing."""


def data_frame(records: Iterable[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """A DataFrame with these columns; `layer` and `head` are nullable integers.

    Raises:
        UserError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError(
            "to_dataframe needs pandas; install it with: pip install 'lipscope[data]'"
        ) from error
    frame = pd.DataFrame.from_records(list(records), columns=list(columns))
    return frame.astype({name: "Int64" for name in WHOLE if name in columns})
