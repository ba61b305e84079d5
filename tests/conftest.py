"""Eight virtual CPU devices for every test, and quick compiles: set before JAX starts.

The default suite is bound by compile time. Level 0 of LLVM leaves the optimisation of the XLA
program as it is, and compiles three times faster.
"""

import os

_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"

# Scripts that need other libraries; their doctests would be collected.
collect_ignore = ["golden"]
