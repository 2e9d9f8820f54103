"""One for each migration of the application schema."""
