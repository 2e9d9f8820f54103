"""mqlayer as a Django application: `INSTALLED_APPS = ["mqlayer.integrations.django", …]`.

Settings from Django's, management commands, and a migration that installs the schema; see the page 'Use Django'.
"""

try:
    import django  # noqa: F401  # names the extra where it is missing
except ImportError as error:
    raise ImportError("mqlayer.integrations.django needs Django: pip install 'mqlayer[django]'") from error
