"""Where a request is prefilled and decoded. Pure."""
