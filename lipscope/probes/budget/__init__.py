"""Numerical error: what low precision costs, where it comes from, and whether a run is correct."""
