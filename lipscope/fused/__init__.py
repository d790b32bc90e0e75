"""Fused attention with every derivative; imports nothing but torch and Triton."""
