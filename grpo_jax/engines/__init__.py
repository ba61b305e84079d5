"""Other engines that sample: servers of the completions protocol."""
