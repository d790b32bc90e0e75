"""Unmodified Hugging Face models, loaded safely and measured through lipscope's own attention."""
