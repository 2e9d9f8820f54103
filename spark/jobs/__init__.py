"""Jobs on snapshots: modules with `run(tables, params)`, also for spark-submit."""
