"""The numbers of each step for other tools: metrics.csv, TensorBoard's files, a callback."""
