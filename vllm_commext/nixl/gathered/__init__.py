"""Reads of many small pieces as few large ones: packed by the peer, and unpacked here."""
