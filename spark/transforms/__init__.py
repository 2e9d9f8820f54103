"""What jobs compute: DataFrame -> DataFrame, without reading or writing anything."""
