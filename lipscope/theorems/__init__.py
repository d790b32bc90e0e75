"""Bounds on the Lipschitz constants of attention, each with its hypotheses, one file per paper."""
