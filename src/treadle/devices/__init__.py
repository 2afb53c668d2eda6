"""Devices that run plans; the protocol is ``treadle/devices/protocol.py``."""
