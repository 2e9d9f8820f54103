"""What the services and operations of a process share."""
