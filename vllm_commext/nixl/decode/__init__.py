"""The decode side of a worker: remote requests, their reads, and the peers they come from."""
