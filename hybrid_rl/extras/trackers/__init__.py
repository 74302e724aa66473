"""W&B, TensorBoard, trackio and MLflow: what metrics.jsonl says of a run, sent elsewhere."""
