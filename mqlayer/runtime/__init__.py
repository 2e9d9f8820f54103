"""Newest known routes and nodes."""
