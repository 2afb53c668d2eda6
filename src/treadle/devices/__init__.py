"""Devices that run plans; the protocol is ``treadle/device.py``."""
