"""What a user installs runs by itself: the wheel in an empty environment, with each extra, as the documents say."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.fixtures.missing_tools import leave_out
from tests.fixtures.plain_install import LOCKS, ROOT, PlainEnvironment, WheelEnvironment
from tests.fixtures.wait import wait_until

pytestmark = [pytest.mark.xdist_group("plain_install"), pytest.mark.timeout(600)]

ADDRESSES = """
from rfc3986_validator import validate_rfc3986

def is_valid_syntax(rule, text):
    return bool(validate_rfc3986(text, rule="URI_reference"))
"""
"""Judges the addresses of an SBOM more strictly than the package of this name, which takes five seconds to import."""


@pytest.mark.full
def test_the_first_program_runs_as_printed_from_a_plain_install(
    plain_with_pip: PlainEnvironment, built_wheel: Path, locked_wheels: Path
) -> None:
    """Every step of the README's section, in an empty folder, from the install to the handled messages."""
    plain = plain_with_pip
    section = (ROOT / "README.md").read_text("utf-8").split("## A first program\n")[1].split("\n## ")[0]
    shell = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    name, program = re.findall(r"Save this as `(\S+)`:\n\n```python\n(.*?)```", section, re.DOTALL)[0]
    (plain.home / name).write_text(program)
    *steps, last = "".join(shell).splitlines()
    assert last.startswith("mqlayer consume ")
    places = shlex.quote(f"{built_wheel.parent} {locked_wheels}")
    # No registry is asked: a package of this name there would be somebody else's.
    # Nor is all compiled: the programs read a part of it.
    settings = f"PIP_NO_INDEX=1 PIP_FIND_LINKS={places} PIP_COMPILE=no"
    script = "\n".join([f"set -e; export {settings}", *steps, f"exec {last}"])
    heard: list[str] = []
    # Apart from what is printed: a log line could come between a line that the program prints and its end.
    log = plain.home / "log.txt"
    try:
        with log.open("w") as errors, subprocess.Popen(
            ["/bin/bash", "-c", script],
            cwd=plain.home, env=plain.variables(), stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            listener = threading.Thread(target=heard.extend, args=(process.stdout,))
            listener.start()
            try:
                wait_until(
                    lambda: is_over(heard, log, process), timeout_s=240, what="three orders booked, by what was printed"
                )
            finally:
                process.send_signal(signal.SIGINT)
                listener.join(30)
            assert booked(heard) == ["10", "20", "30"], said(heard, log)
            assert process.wait(30) == 0, said(heard, log)
        states = plain.run(plain.programs / "mqlayer", "status", "--json")
        assert '"name":"worker"' in states.replace(" ", "")
    finally:
        plain.run(plain.programs / "mqlayer", "down", "--erase")


def is_over(heard: list[str], log: Path, process: subprocess.Popen[str]) -> bool:
    """Say whether all is booked, or the program ended; what it printed is shown where neither comes."""
    assert booked(heard) == ["10", "20", "30"] or process.poll() is not None, said(heard, log)
    return True


def said(heard: list[str], log: Path) -> str:
    """Return what was printed, and what was logged."""
    return "".join(heard) + log.read_text("utf-8")


def booked(lines: list[str]) -> list[str]:
    """Return the amounts that the program says it booked."""
    return [match[1] for line in list(lines) if (match := re.match(r"booked (\d+) for customer-1$", line))]


@pytest.mark.full
def test_every_module_is_imported_from_a_plain_install_or_says_which_extra_it_needs(
    wheel_environment: WheelEnvironment,
) -> None:
    missed = wheel_environment.missed
    extras = {"archive.arrow_types": "parquet", "console": "console"}
    extras |= {"integrations.django": "django", "integrations.fastapi": "fastapi"}
    extras |= {"spark": "spark", "testing.plugin": "testing"}
    for line, (module, extra) in zip(missed, extras.items(), strict=True):
        assert line.split(":")[0] == f"mqlayer.{module}"
        assert f"pip install 'mqlayer[{extra}]'" in line


def test_a_worker_of_the_image_has_all_that_it_imports(
    plain_empty: PlainEnvironment, built_wheel: Path, database_dsn: str, redis_url: str
) -> None:
    """What the Dockerfile installs: the lock file with hashes, and the wheel without another look at dependencies."""
    plain_empty.install("--require-hashes", "--requirement", LOCKS / "image.lock")
    plain_empty.install("--no-deps", built_wheel)
    program = """
from mqlayer.workers.app import app
app.loader.import_default_modules()
with app.connection_for_write() as connection:
    connection.ensure_connection(max_retries=1)
print(len([name for name in app.tasks if name.startswith("mqlayer.")]))
"""
    assert int(plain_empty.tries(program, MQLAYER_DSN=database_dsn, MQLAYER_BROKER_URL=redis_url)) > 10


@pytest.mark.full
def test_the_sbom_lists_what_the_image_installs(tmp_path: Path) -> None:
    """Each package of the lock file that this Python takes, in its version, with a licence; and nothing else."""
    (tmp_path / "rfc3987_syntax.py").write_text(ADDRESSES)
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [ROOT / "scripts" / "sbom"]
    bom = json.loads(subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True).stdout)
    assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", "mqlayer")
    listed = {canonicalize_name(one["name"]): one["version"] for one in bom["components"]}
    entries = re.findall(r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\$", (LOCKS / "image.lock").read_text("utf-8"), re.MULTILINE)
    assert listed == {name: version for name, version, marker in entries if not marker or Marker(marker).evaluate()}
    assert [one["name"] for one in bom["components"] if not one.get("licenses")] == []
    (ours,) = (one for one in bom["dependencies"] if one["ref"] == bom["metadata"]["component"]["bom-ref"])
    direct = {Requirement(line).name for line in project()["dependencies"]}
    assert {reference.split("==")[0] for reference in ours["dependsOn"]} == direct


@pytest.mark.full
def test_the_parquet_extra_reads_as_arrow(plain: PlainEnvironment, built_wheel: Path, database_dsn: str) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[parquet]")
    program = """
from mqlayer.postgres.arrow_reader import arrow_batches, read_address
import mqlayer.archive.arrow_types, os, pyarrow.parquet
with arrow_batches(read_address(os.environ["MQLAYER_DSN"]), ["SELECT 42 AS answer"], application="test") as batches:
    print([batch.to_pylist() for batch in batches])
"""
    assert "[[{'answer': 42}]]" in plain.tries(program, MQLAYER_DSN=database_dsn)


@pytest.mark.full
def test_the_lake_extra_writes_delta_tables(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[lake]")
    program = """
from mqlayer.archive.lake.tables import TABLES, LakeTable
for name in TABLES:
    LakeTable("lake", name).create("a")
print([LakeTable("lake", name).place(1) for name in TABLES])
"""
    assert plain.tries(program).splitlines()[-1] == "[0, 0, 0]"


@pytest.mark.full
def test_the_certificates_extra_signs(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[certificates]")
    program = """
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pathlib import Path
from mqlayer.archive.signatures import check_signature, sign
key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
Path("key.pem").write_bytes(key)
made = sign(b"x", Path("key.pem"))
print(check_signature(b"x", made, None), check_signature(b"y", made, None))
"""
    assert plain.tries(program).startswith("None the signature is of another content")


@pytest.mark.full
def test_the_extras_of_web_frameworks_import_their_part(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[fastapi]")
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[django]")
    program = """
from django.conf import settings
settings.configure(INSTALLED_APPS=["mqlayer.integrations.django"])
import django, mqlayer.integrations.fastapi
from pathlib import Path
from mqlayer.cli.project import init
django.setup()
init("fastapi", Path("of-the-wheel"))
print("both")
"""
    assert plain.tries(program).splitlines()[-1] == "both"


@pytest.mark.full
def test_the_s3_extra_brings_its_client(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[s3]")
    assert plain.tries("import mqlayer.large_bodies.object_store, boto3; print('both')").splitlines()[-1] == "both"


@pytest.mark.full
def test_the_otel_extra_answers_with_metrics(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[otel]")
    program = """
from mqlayer import Settings
from mqlayer.metrics import meters_of, metrics_page
settings = Settings(metrics=True)
meters_of(settings).sent("orders", 7, 0.1)
lines = metrics_page(settings)().decode().splitlines()
print([line.split()[-1] for line in lines if line.startswith("messaging_client_sent")])
"""
    assert plain.tries(program).strip() == "['7.0']"


@pytest.mark.full
def test_the_extras_of_the_console_serve_its_login(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[console,oidc]")
    program = """
import asyncio
from mqlayer import Settings
from mqlayer.console import LevelGroups, LoginAccess, OpenId, Site, console_app
openid = OpenId("https://id.example.com", "console", None, LevelGroups(["*"]))
web = console_app(Settings(), access=LoginAccess(Site("https://mq.example.com"), openid=openid))
scope = {"type": "http", "method": "GET", "path": "/login", "query_string": b"", "headers": [], "root_path": ""}
told = []
async def receive():
    return {"type": "http.request"}
async def send(message):
    told.append(message)
asyncio.run(web(scope, receive, send))
print(told[0]["status"], b"/login/openid" in told[1]["body"])
"""
    assert plain.tries(program).strip() == "200 True"


@pytest.mark.full
def test_the_reload_extra_watches_files(plain: PlainEnvironment, built_wheel: Path) -> None:
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[reload]")
    program = """
from pathlib import Path
from mqlayer.cli.reload import changed_files
with changed_files(Path.cwd()) as changed:
    print(changed())
"""
    assert plain.tries(program).strip() == "False"


@pytest.mark.full
def test_the_containers_extra_finds_an_engine_or_goes_on_without(plain: PlainEnvironment, built_wheel: Path) -> None:
    """Where an engine answers and has or gets the image, a Redis starts in it; else its imports are tried."""
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[containers]")
    program = """
from pathlib import Path
import docker
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from mqlayer.stack.containers import RedisContainer, docker_answers
from mqlayer.stack.errors import ServerFailed
if docker_answers():
    server = RedisContainer(Path("node").resolve())
    try:
        server.start()
        print("running", server.running)
    except ServerFailed as error:
        print("no image" if "has no image" in str(error) else error)
    finally:
        server.erase()
else:
    print("no engine")
"""
    answer = plain.tries(program).strip()
    if answer == "no image":
        leave_out("a Docker engine answers, and neither has nor gets the image of Redis")
    assert answer in ("running True", "no engine")


@pytest.mark.full
def test_the_testing_extra_gives_pytest_the_fixtures(
    plain: PlainEnvironment, built_wheel: Path, database_dsn: str, redis_url: str
) -> None:
    """Nor does pytest compile the package anew, as it does with others that have a plugin."""
    plain.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[testing]")
    (plain.home / "test_it.py").write_text("""
import hypothesis
import mqlayer.errors

def test_it(mqlayer_stack):
    mqlayer_stack.add_topic("orders")
    assert mqlayer_stack.execute("SELECT name FROM mqlayer.topic") == [("orders",)]
    assert type(mqlayer.errors.__loader__).__name__ == "SourceFileLoader"
""")
    given = {"MQLAYER_DSN": database_dsn, "MQLAYER_REDIS_URL": redis_url}
    assert "1 passed" in plain.run(plain.python, "-m", "pytest", "-q", **given)


def test_the_spark_extra_runs_a_session(
    plain_empty: PlainEnvironment, built_wheel: Path, request: pytest.FixtureRequest
) -> None:
    """Its package has 400 MB: without `--long`, only what the extra declares is looked at."""
    spark = [Requirement(line) for line in requires("mqlayer") or () if 'extra == "spark"' in line]
    assert {one.name for one in spark} == {"adbc-driver-postgresql", "pyarrow", "pyspark"}
    if request.config.getoption("--long"):
        plain_empty.install("--constraint", LOCKS / "dev.lock", f"{built_wheel}[spark]")
        program = "import mqlayer.spark; print(mqlayer.spark.session(master='local[1]').range(3).count())"
        variables = {"PATH": f"{plain_empty.programs}:/usr/bin:/bin"}
        assert plain_empty.tries(program, **variables).strip() == "3"


def test_every_extra_has_a_test_here() -> None:
    named = re.findall(r"\[([\w,]+)\]\"\)", Path(__file__).read_text("utf-8"))
    tested = {extra for names in named for extra in names.split(",")} | {"embedded"}
    # dev and docs are for this repository: `scripts/test` and `scripts/docs` use them.
    assert tested | {"dev", "docs"} == set(project()["optional-dependencies"])


def project() -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return facts
