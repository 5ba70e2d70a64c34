"""Reads of a prefill worker on the same host through a mapping of its GPU memory."""
