"""One model on several engines or machines."""
