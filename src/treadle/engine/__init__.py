"""The engine: runs a batch on a device by its prepared plan and returns logits."""
