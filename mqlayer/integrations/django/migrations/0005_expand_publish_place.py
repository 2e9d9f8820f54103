"""Publishing many messages in one transaction, as `mqlayer migrate` makes it."""

from __future__ import annotations

from django.db import migrations

from mqlayer.integrations.django.schema import install


class ExpandPublishPlace(migrations.Migration):
    """Runs on a connection of its own, as the first one does."""

    atomic = False
    dependencies = (("mqlayer", "0004_expand_fence_walk"),)
    operations = (migrations.RunPython(install, migrations.RunPython.noop),)


# The name by which Django finds it.
Migration = ExpandPublishPlace
