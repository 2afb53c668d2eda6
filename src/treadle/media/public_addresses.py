"""IP addresses of the public internet.

The tables are IANA's registries of special-purpose addresses (RFC 6890) as of 2026. The standard
library's ``is_global`` is not used: it differs from one Python version to the next, and takes
addresses that hold another one (NAT64) as public.
"""

from __future__ import annotations

import ipaddress

_SPECIAL_4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # the host of a virtual machine in Azure
        "169.254.0.0/16",  # link-local; the metadata services of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved; broadcast
    )
]
# Everything outside is loopback, link-local, private (fc00::/7), site-local, multicast, an IPv4
# address in IPv6's form (::ffff:0:0/96, 64:ff9b::/96), or reserved.
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments; Teredo, which holds an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which holds an IPv4 address
        "3fff::/20",  # documentation
    )
]


def is_public(address: str) -> bool:
    """Whether a numeric IP address is one of the public internet; False for any other text."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in _SPECIAL_4)
    if found.scope_id is not None or found not in _UNICAST_6:
        return False
    return not any(found in network for network in _SPECIAL_6)
