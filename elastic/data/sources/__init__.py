"""Where samples are read from: text, JSON lines, Parquet, tokenized rows, locally or through the node's block cache."""
