"""The character language model of `lipscope train`."""
