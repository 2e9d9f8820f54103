"""The newest known routes and nodes of a process."""
