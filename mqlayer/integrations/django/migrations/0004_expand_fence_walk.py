"""The fence's cleanup by blocks, as `mqlayer migrate` makes it."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class ExpandFenceWalk(migrations.Migration):
    """Runs on a connection of its own, as the first one does."""

    atomic = False
    dependencies = (("mqlayer", "0003_expand_outbox_replica_identity"),)
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = ExpandFenceWalk
