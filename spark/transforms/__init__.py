"""Jobs' computations: DataFrame -> DataFrame, no input or output."""
