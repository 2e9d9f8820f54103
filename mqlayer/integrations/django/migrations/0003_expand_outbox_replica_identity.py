"""Slots of the outbox with a replica identity, as `mqlayer migrate` makes them."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class ExpandReplicaIdentity(migrations.Migration):
    """Runs on a connection of its own, as the first one does."""

    atomic = False
    dependencies = (("mqlayer", "0002_expand_relay_place"),)
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = ExpandReplicaIdentity
