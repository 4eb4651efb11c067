"""Trainers, one file each. A file imports its trainer when it is used, never when this package is imported."""
