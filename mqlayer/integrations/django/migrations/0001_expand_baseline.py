"""The application schema, as `mqlayer migrate` installs it."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class InstallSchemas(migrations.Migration):
    """Runs on a connection of its own, which takes a lock and the role of the schema's owner."""

    initial = True
    atomic = False
    dependencies = ()
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = InstallSchemas
