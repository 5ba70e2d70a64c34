"""What was measured: tables, where they come from, and how they are made on this machine."""
