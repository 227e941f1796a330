"""What runs inside the sandbox, by its own Python: standard library and Playwright alone, nothing of the line's."""
