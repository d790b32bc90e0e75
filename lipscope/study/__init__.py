"""Studies: plan jobs, run them, store their rows durably, fit and show them."""
