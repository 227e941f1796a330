"""Sandboxes: what the agent's commands run in. `box` is the contract, `host` puts the parts together."""
