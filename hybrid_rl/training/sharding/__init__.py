"""Models over several ranks: FSDP2 shards, their unsharded twins and shared memory."""
