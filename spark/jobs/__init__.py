"""Jobs on snapshots: each reads, transforms, and hands back what it found, to be written and shown.

A module of this package is one job, with `run(tables, params)`, and a program of its own for spark-submit.
"""
