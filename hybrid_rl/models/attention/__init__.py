"""Attention of packed rows and of single samples: the interface, and what it runs on."""
