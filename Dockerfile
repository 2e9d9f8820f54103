# One image for every process of mqlayer: relay, Celery worker, beat, consumers.
FROM python:3.13-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY mqlayer mqlayer
COPY workers workers
COPY spark spark
COPY lua lua
COPY sql sql
RUN pip install --no-cache-dir . && useradd --system --no-create-home mqlayer
# What was installed is used, not the sources: Python looks into the working directory first.
WORKDIR /home
USER mqlayer
ENTRYPOINT ["mqlayer"]
CMD ["--help"]
