"""Bounds and attacks over the heads of a model."""
