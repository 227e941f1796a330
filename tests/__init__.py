"""Tests by cost: unit (no service, no sleep), integration (real services), faults (kills and cuts)."""
