"""Programs that measure mqlayer against a raw baseline in the same run: `python -m bench [NAME …] [--json]`.

They print ratios; they are no tests, and say nothing of another machine. `bench/results` is their record.
"""
