"""Decisions only: no Ray, no model, no clock, no I/O. Time and randomness are arguments."""
