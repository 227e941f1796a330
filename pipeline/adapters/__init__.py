"""What each trainer calls a trajectory: pure functions from a `Rollout` to its contract; and thin clients.

`pipeline.adapters.rows` flattens rollouts; one module a trainer goes on from there. docs/trainers.md: who owns what.
"""
