"""The errors that a caller can fix."""

from __future__ import annotations


class UserError(ValueError):
    """An error the caller can fix.

    The message names the offending argument, what was expected, and the remedy. It is a
    `ValueError`, so code that catches those keeps working.

    Example:
        >>> import lipscope as ls
        >>> try:
        ...     ls.Ball(R=-1.0, n=3)
        ... except ls.UserError as error:
        ...     print(error)
        Ball(R, n) needs a finite radius R > 0, got R=-1.0
    """
