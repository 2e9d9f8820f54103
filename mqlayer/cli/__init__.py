"""The `mqlayer` command."""
