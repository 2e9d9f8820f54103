"""The Django application: a project made of the how-to page migrates, publishes, relays and consumes by `manage.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from mqlayer.postgres.migrations import migrations
from tests.fixtures.forked_programs import ask_python, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "use-django.md"
TEMPLATE = ROOT / "mqlayer" / "templates" / "django"
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


class Project:
    """A Django project in a folder."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        others = {name: value for name, value in os.environ.items() if not name.startswith("MQLAYER_")}
        self.environment = {
            **others,
            "MQLAYER_DSN": dsn,
            "MQLAYER_LEASE_S": "10",
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        }

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def manage(self, *words: str) -> subprocess.CompletedProcess[str]:
        return ask_python("manage", *words, cwd=self.folder, env=self.environment)


@pytest.fixture
def project(tmp_path: Path, empty_database_dsn: str, key_prefix: str) -> Project:
    """The project of the page; the models are those of `mqlayer init django`."""
    project = Project(tmp_path, empty_database_dsn)
    files = dict(FILE.findall(PAGE.read_text("utf-8")))
    orders = {f"orders/{name}.py" for name in ("services", "views", "consumers", "tests")}
    assert set(files) == {"shop/settings.py", "shop/urls.py", *orders}
    assert (TEMPLATE / "orders/views.py.tmpl").read_text("utf-8").endswith(files["orders/views.py"])
    for name in ("manage.py", "orders/models.py", "orders/migrations/0001_initial.py"):
        files[name] = (TEMPLATE / f"{name}.tmpl").read_text("utf-8")
    for name, text in files.items():
        project.write(name, text.replace('"KEY_PREFIX": "shop"', f'"KEY_PREFIX": "{key_prefix}"'))
    for package in ("shop", "orders", "orders/migrations"):
        project.write(f"{package}/__init__.py", "")
    return project


PROGRAM = """
import django
from django.core.management import call_command

django.setup()
from orders.services import place

call_command("migrate")
call_command("makemigrations", "--check", "--dry-run")
call_command("mqlayer", "node", "register", "node-1", {url!r})
call_command("mqlayer", "topic", "create", "orders", "--partitions", "2")
for amount in (10, 200, 20):
    try:
        place("ann", amount)
    except ValueError:
        pass
call_command("mqlayer_relay", "--once")
"""


def test_a_project_of_the_page_runs(project: Project, redis_url: str, empty_database_dsn: str) -> None:
    done = ask_python("-c", PROGRAM.format(url=redis_url), cwd=project.folder, env=project.environment)
    assert "Applying mqlayer.0001_expand_baseline... OK" in done.stdout, done.stderr
    assert "No changes detected" in done.stdout
    assert "2 messages relayed" in done.stdout
    consuming = start_python("manage", "mqlayer_consume", cwd=project.folder, env=project.environment)
    try:
        wait_until(
            lambda: ask_postgres(empty_database_dsn, "SELECT amount FROM orders_booking ORDER BY id") == [(10,), (20,)],
            timeout_s=30,
            what="both orders booked",
        )
    finally:
        consuming.send_signal(signal.SIGTERM)
        assert consuming.wait(30) == 0
    listed = project.manage("mqlayer", "topic", "list", "--json")
    assert json.loads(listed.stdout)["topic"] == "orders"


def test_the_tests_of_the_page_run_on_djangos_test_database(project: Project, empty_database_dsn: str) -> None:
    """Also where MQLAYER_DSN names the database for which it stands, which stays as it was."""
    done = project.manage("test", "--noinput")
    assert "Ran 2 tests" in done.stderr
    assert "OK" in done.stderr, done.stderr
    assert ask_postgres(empty_database_dsn, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'mqlayer%'") == []


@pytest.mark.full
def test_what_is_misspelt_is_named(project: Project) -> None:
    settings = (project.folder / "shop" / "settings.py").read_text()
    project.write("shop/settings.py", settings.replace('"CONSUMERS"', '"CONSUMER"'))
    done = project.manage("mqlayer", "topic", "list")
    assert "MQLAYER has no option 'CONSUMER': did you mean 'CONSUMERS'?" in done.stderr
    project.write("shop/settings.py", settings.replace('"CONSUMERS": "orders.consumers:app", ', ""))
    done = project.manage("mqlayer_consume")
    assert done.returncode == 1
    assert "say where the App is: mqlayer_consume shop.consumers:app" in done.stderr


def test_each_migration_of_the_application_schema_has_one_of_djangos() -> None:
    """Where this fails, add a migration that calls `install`."""
    folder = ROOT / "mqlayer" / "integrations" / "django" / "migrations"
    assert sorted(path.stem for path in folder.glob("0*.py")) == [
        f"{one.number:04d}_{one.name}" for one in migrations("application")
    ]
