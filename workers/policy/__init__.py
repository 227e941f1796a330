"""The policy as workers see it: a tokenizer, a client of its server, and a scripted server for demo and tests."""
