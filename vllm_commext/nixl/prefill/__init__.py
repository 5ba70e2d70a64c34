"""The prefill side: finished prefills that wait for readers, and the side channel's server."""
