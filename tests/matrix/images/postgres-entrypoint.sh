#!/bin/sh
# Stands in for the entry script of the image postgres: a first start makes the cluster, by POSTGRES_PASSWORD or
# POSTGRES_HOST_AUTH_METHOD, with POSTGRES_INITDB_ARGS, and the database POSTGRES_DB.
set -e
PGDATA="${PGDATA:-/var/lib/postgresql/data}"
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    chown -R postgres:postgres "$PGDATA" /var/run/postgresql
    chmod 700 "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --clear-groups -- "$0" "$@"
fi
if [ ! -e "$PGDATA/PG_VERSION" ]; then
    if [ -n "${POSTGRES_PASSWORD:-}" ]; then
        umask 077
        printf '%s\n' "$POSTGRES_PASSWORD" >/tmp/password
        initdb -D "$PGDATA" --username postgres --pwfile /tmp/password $POSTGRES_INITDB_ARGS
        rm /tmp/password
        method="${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}"
    else
        method="${POSTGRES_HOST_AUTH_METHOD:?set POSTGRES_PASSWORD}"
        initdb -D "$PGDATA" --username postgres --auth "$method" $POSTGRES_INITDB_ARGS
    fi
    echo "host all all all $method" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    if [ -n "${POSTGRES_DB:-}" ]; then
        echo "CREATE DATABASE \"$POSTGRES_DB\"" | postgres --single -D "$PGDATA" postgres
    fi
fi
exec "$@" -D "$PGDATA"
