"""Chaos as a program: `python -m tests.chaos --seed N --minutes M`."""
