"""Measurements of the user's own machines: ``paceline bench``."""
