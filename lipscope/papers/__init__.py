"""Claims of the papers, each with the run that tests it and the rule that judges the numbers."""
