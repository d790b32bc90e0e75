"""Other attention in the place of a model's own, measured before and after."""
