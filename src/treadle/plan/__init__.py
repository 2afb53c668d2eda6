"""Plans (the steps of a forward pass), and the lowering of a graph's operations into steps."""
