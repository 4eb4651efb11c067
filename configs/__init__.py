"""Configs: one file per experiment, presets by name after a colon."""
