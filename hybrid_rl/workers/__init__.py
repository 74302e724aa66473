"""Workers: what runs on a rank."""
