"""Compare theorems and attacks with the measured constants of a model's heads and layers."""
