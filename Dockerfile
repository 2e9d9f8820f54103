# One image for every process of mqlayer: relay, Celery worker, beat, consumers.
# All packages come by the hashes of requirements/; `scripts/sbom` lists them.
FROM python:3.13-slim AS build

WORKDIR /app
COPY requirements/build.lock requirements/build.lock
RUN pip install --no-cache-dir --require-hashes --requirement requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY mqlayer mqlayer
COPY workers workers
COPY spark spark
COPY lua lua
COPY sql sql
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# For the profile `spark` of docker-compose.yml: Spark's master and workers, and the programs that they run.
FROM python:3.13-slim AS spark

RUN apt-get update && \
    apt-get install --yes --no-install-recommends default-jre-headless libpostgresql-jdbc-java && \
    rm -rf /var/lib/apt/lists/*
COPY requirements/build.lock requirements/spark.lock /tmp/
# pyspark comes as source.
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/build.lock && \
    pip install --no-cache-dir --no-build-isolation --require-hashes --requirement /tmp/spark.lock
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && useradd --system --no-create-home mqlayer
WORKDIR /home
USER mqlayer
ENTRYPOINT ["mqlayer"]
CMD ["--help"]

FROM python:3.13-slim

COPY requirements/image.lock /tmp/image.lock
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/image.lock && rm /tmp/image.lock
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl && useradd --system --no-create-home mqlayer
WORKDIR /home
USER mqlayer
ENTRYPOINT ["mqlayer"]
CMD ["--help"]
