"""Redis: key names, scripts, connections to nodes."""
