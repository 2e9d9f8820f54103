"""Strictly ordered, elastic messaging on the Redis and Postgres that a team already runs."""

__version__ = "0.1.0"
