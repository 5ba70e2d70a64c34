"""Tables of measurements: their sources, and how one is made on this machine."""
