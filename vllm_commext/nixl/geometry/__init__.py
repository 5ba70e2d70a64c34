"""Pure arithmetic: cache layouts, head and state intervals, plans, descriptors, block lists."""
