"""`python -m bench.quick_restarts` is the `mqlayer` command, which starts dead processes again with no growing wait."""

from __future__ import annotations

from mqlayer.cli import supervisor
from mqlayer.cli.main import app

if __name__ == "__main__":
    setattr(supervisor, "LONGEST_WAIT_S", 0.1)  # noqa: B010
    app(prog_name="mqlayer")
