import sys

from grpo_jax.__main__ import end_at_interrupt

if sys.argv[0] == "-m":  # Python imports this package to find a script in it: `python -m experiments.NAME`
    end_at_interrupt()
