"""Layers with a recurrent state: Mamba, delta rules, RWKV, convolutions, chunked scans."""
