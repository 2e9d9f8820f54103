"""The bank: pgbench's TPC-B workload becomes ordered messages, and these become a read model of all balances.

`python -m examples.bank.run` starts everything, breaks some of it on the way, and judges the result.
"""
