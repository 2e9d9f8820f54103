"""The application."""

from __future__ import annotations

from django.apps import AppConfig

from mqlayer.integrations.django.configuration import (
    database_settings,
    export_options,
    note_database,
    settings_of_tests,
)
from mqlayer.settings import add_first_source, add_source


class MqlayerConfig(AppConfig):
    """Gives `mqlayer.Settings` what Django knows."""

    name = "mqlayer.integrations.django"
    label = "mqlayer"
    verbose_name = "mqlayer"

    def ready(self) -> None:
        """Raises ImproperlyConfigured for an option that there is not."""
        export_options()
        note_database()
        add_source(database_settings)
        add_first_source(settings_of_tests)
