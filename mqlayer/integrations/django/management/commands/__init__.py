"""Each runs a command of `mqlayer`."""
