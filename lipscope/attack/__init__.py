"""Inputs that make the local Lipschitz constant large: closed forms, ascent, directions, token swaps."""
