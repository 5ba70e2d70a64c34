"""One request on its way from its acceptance to its last byte."""
