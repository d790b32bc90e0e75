"""Studies: jobs planned, run, kept durably, fitted and shown."""
