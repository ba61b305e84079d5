"""A class for vLLM's workers, which load parameters and say which they hold.

`vllm serve … --worker-extension-cls grpo_jax.engines.worker.PolicyWorker` adds it to them. vLLM's environment needs
only this package, without what it depends on.
"""

from pathlib import Path
from typing import Any


class PolicyWorker:
    """Methods of a vLLM worker, which `/collective_rpc` calls."""

    def load_policy(self: Any, folder: str) -> str:
        """Loads parameters from a folder, whose name is their version.

        Returns:
          "", or the reason why nothing was loaded.
        """
        if not Path(folder).is_dir():
            return f"there is no folder {folder}"
        self.reload_weights(weights_path=folder)
        self._pack_tied_head()
        self.held_policy = Path(folder).name
        return ""

    def policy_version(self: Any) -> str:
        """Returns the version of the parameters, or "" before the first."""
        return getattr(self, "held_policy", "")

    def _pack_tied_head(self: Any) -> None:
        """Packs a tied head again, since vLLM packs it only once on a CPU, as it starts."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
