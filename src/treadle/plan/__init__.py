"""Plans: the steps of a forward pass, and how a graph's operations become steps."""
