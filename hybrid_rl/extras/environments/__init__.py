"""Adapters to the environments of other libraries. None of those is imported until one of its objects is used."""
