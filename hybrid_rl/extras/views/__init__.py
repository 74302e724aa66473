"""How batches, results and runs show themselves in notebooks, and samples and a Trainer in terminals."""
