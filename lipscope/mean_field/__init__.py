"""Infinitely many tokens: attention as a map of probability measures."""
