"""Replace the attention of a model, and measure its layers before and after."""
