"""The fence of batches in three statements, as `mqlayer migrate` makes it."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class ExpandFenceBatches(migrations.Migration):
    """Runs on a connection of its own, as the first one does."""

    atomic = False
    dependencies = (("mqlayer", "0005_expand_publish_place"),)
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = ExpandFenceBatches
