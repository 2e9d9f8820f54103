"""The stack of docker-compose.yml as a newcomer starts it, for the matrix' row `compose`."""
