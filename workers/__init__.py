"""The Celery side of mqlayer: the app, its schedule, and tasks of a few lines that call the library."""

if __name__ != "mqlayer.workers":
    raise ImportError("import this package as mqlayer.workers", name=__name__)
