"""Studies to look at: figures for papers and notebooks, and one self-contained page to forward."""
