"""The engines that a proxy knows, and their state."""
