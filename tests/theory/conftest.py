"""Tests bound what could hang, never speed: a loaded machine must not fail a property by being slow."""

from hypothesis import settings

settings.register_profile("no-deadline", parent=settings(), deadline=None)
settings.load_profile("no-deadline")
