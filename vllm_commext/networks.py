"""Which network a client is counted by, at the side channel and at the proxy."""

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 one, which one customer has. A socket for both kinds
    sees an IPv4 peer as a mapped address, which counts as the IPv4 one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped or address.version == 4:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))
