"""Postgres: pools, named queries, migrations."""
