"""Live models: monitor the constants of layers while training, and replace their attention."""
