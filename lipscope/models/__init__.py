"""Hugging Face models, unmodified: loaded safely, measured through lipscope's own attention."""
