"""What is measured at a site: bounds, attacks and numerical error."""
