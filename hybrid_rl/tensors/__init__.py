"""Local parts of sharded tensors, and copies between host and device."""
