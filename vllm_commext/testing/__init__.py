"""What proves the package on real servers: tiny models, server processes, comparison, metrics, a
corrupting control."""
