"""The application schema of protocol 2, as `mqlayer migrate` brings it there."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class ExpandSchemas(migrations.Migration):
    """Runs on a connection of its own, as the first one does."""

    atomic = False
    dependencies = (("mqlayer", "0001_expand_baseline"),)
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = ExpandSchemas
