"""One model on several engines or machines: pipeline stages, and replicas in a Ray cluster."""
