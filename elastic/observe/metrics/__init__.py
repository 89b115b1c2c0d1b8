"""The numbers of each step for other tools: metrics.csv, TensorBoard, a callback, Prometheus."""
