"""The proxy's window for operators: one page, and the state that it shows."""
