"""The constants of layers while a model trains."""
