"""Five incidents on a system of its own, to practise on with the console: `python -m examples.incidents`."""
