"""Configuration: the typed schema, reading it from YAML and overrides, checking it, and the batch numbers it implies.

Nothing in this package imports torch, opens a process group or touches a device, so that a fault in a config is
reported within a second of the start.
"""
