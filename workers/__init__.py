"""Celery's side: application, schedule, and short tasks that call the library."""

if __name__ != "mqlayer.workers":
    raise ImportError("import this package as mqlayer.workers", name=__name__)
