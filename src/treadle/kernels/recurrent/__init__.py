"""Layers with a state: Mamba, delta rules, RWKV, convolutions, chunked scans."""
