"""The `mqlayer` command: one module per command group, each with `add_to(app)`."""
