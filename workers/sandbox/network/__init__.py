"""The network of a sandbox that may have one: a gate to the hosts that its task names, or an address of its own."""
