"""Hosts on one machine: network namespaces, and a switch between them that delays and loses."""

from pdkv.testing.hosts.link import Link
from pdkv.testing.hosts.netns import Host, Hosts, unavailable

__all__ = ["Host", "Hosts", "Link", "unavailable"]
