"""A first program: see orders.py."""
