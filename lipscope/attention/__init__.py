"""The attention map and its derivatives."""
