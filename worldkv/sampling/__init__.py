"""The solver and the choice of the steps that run the network. Knows no model and no cache."""
