"""Trees of parameters: what is trained, adapters, quantised and rounded copies, and shards."""
