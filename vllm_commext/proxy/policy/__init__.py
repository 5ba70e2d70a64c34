"""Where a request is prefilled and decoded, and when. No I/O."""
