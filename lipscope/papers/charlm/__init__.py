"""The character language model of `lipscope train`."""

from lipscope.papers.charlm.training import train_character_model as train_character_model

__all__ = ["train_character_model"]
