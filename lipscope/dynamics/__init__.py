"""Infinitely deep: tokens that flow through residual attention, as particles, Gaussians and perturbations."""
