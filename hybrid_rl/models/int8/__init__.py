"""Models that compute with weights of 8 bits."""
