"""HugeCTR's formats of training data: Norm, Raw and Parquet, read in blocks of many records."""
