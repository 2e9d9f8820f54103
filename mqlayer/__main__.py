"""`python -m mqlayer` is the `mqlayer` command."""

from mqlayer.cli.main import app

app(prog_name="mqlayer")
