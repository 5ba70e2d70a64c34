"""Parts of the chaos suite: the schedule, the servers, the load, the faults, the report."""
