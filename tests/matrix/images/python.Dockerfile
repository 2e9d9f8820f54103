# Stands in for the image python:3.13-slim: Python in /usr/local/python, first in PATH, with this machine's authorities.
FROM mqlayer-matrix/trixie
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates python3-venv && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /usr/local/python
COPY authorities.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt
CMD ["python3"]
