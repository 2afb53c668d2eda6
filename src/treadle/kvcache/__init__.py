"""The KV cache: pages of keys and values that sequences with the same prefix share."""
