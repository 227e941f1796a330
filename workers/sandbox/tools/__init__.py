"""What an agent does in a box: a persistent bash, a persistent IPython kernel, and files. `session.Session` has all."""
