# grpo_jax on NVIDIA GPUs: docker build -t grpo_jax . && docker run --rm --gpus all grpo_jax train --help
# CUDA's own libraries come with jax[cuda13]; of the machine it needs the driver and the NVIDIA Container Toolkit.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/grpo_jax
COPY pyproject.toml README.md LICENSE ./
COPY grpo_jax ./grpo_jax
# hadolint ignore=DL3013
RUN python3 -m venv /opt/venv && pip install --no-cache-dir '.[train,cuda]'

WORKDIR /work
ENTRYPOINT ["grpo-jax"]
CMD ["--help"]
