"""What a model is: its configuration, its architecture's traits, its graph as steps."""
