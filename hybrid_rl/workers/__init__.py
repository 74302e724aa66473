"""Workers: the code that runs on a rank."""
