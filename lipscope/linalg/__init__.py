"""Linear operators, derivatives and one solver for the largest singular value."""
