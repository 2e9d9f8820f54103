#!/bin/sh
# Stands in for the entry script of the image valkey/valkey: the server runs in /data, as an account of its own.
set -e
case "$1" in -*) set -- valkey-server "$@" ;; esac
if [ "$1" = valkey-server ] && [ "$(id -u)" = 0 ]; then
    chown -R valkey:valkey /data
    exec setpriv --reuid valkey --regid valkey --clear-groups -- "$0" "$@"
fi
cd /data
# As that image is built: the engine decides who reaches the port.
if [ "$1" = valkey-server ]; then set -- "$@" --protected-mode no; fi
exec "$@"
