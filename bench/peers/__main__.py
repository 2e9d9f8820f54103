"""`python -m bench.peers [NAME …] [--messages N]`: the table on standard output, progress on standard error."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import msgspec
import typer

from bench.peers.catalogue import PEERS, peer_named
from bench.peers.ground import Ground
from bench.peers.report import PeerRow, table
from bench.peers.runner import measure
from bench.registry import note


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Systems; all without a name.")] = None,
    messages: Annotated[int, typer.Option(min=100, help="Messages to publish and to consume.")] = 50_000,
    fresh: Annotated[bool, typer.Option("--fresh", help="Install the newest packages anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only one JSON object per system.")] = False,
) -> None:
    """Put one load on mqlayer and on other systems, each in its fastest setting that loses no confirmed message."""
    known = [peer.name for peer in PEERS]
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(f"no system {', '.join(unknown)}; there are: {', '.join(known)}")
    rows: list[PeerRow] = []
    with Ground() as ground:
        for name in names or known:
            note(f"{name} (load {os.getloadavg()[0]:.1f})")
            peer = peer_named(name)
            if fresh:
                ground.packages(peer).remove()
            rows.append(measure(peer, ground, messages))
            if rows[-1].skipped:
                note(f"  left out: {rows[-1].skipped}")
    if not as_json:
        typer.echo(table(rows) + "\n")
    for row in rows:
        typer.echo(msgspec.json.encode(row))


if __name__ == "__main__":
    # Its servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    typer.run(main)
