#!/bin/sh
# Stands in for the entry script of the image redis: the server runs in /data, as an account of its own.
set -e
case "$1" in -*) set -- redis-server "$@" ;; esac
if [ "$1" = redis-server ] && [ "$(id -u)" = 0 ]; then
    chown -R redis:redis /data
    exec setpriv --reuid redis --regid redis --clear-groups -- "$0" "$@"
fi
cd /data
# As that image is built: the engine decides who reaches the port.
if [ "$1" = redis-server ]; then set -- "$@" --protected-mode no; fi
exec "$@"
