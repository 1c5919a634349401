# The image of `shardwise launch`: docker build -t REGISTRY/shardwise:0.1.0 . && docker push REGISTRY/shardwise:0.1.0
# torch from PyPI brings CUDA's libraries; the driver is the node's. For a CPU image: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim
ARG TORCH_INDEX=https://pypi.org/simple
# A C compiler: inductor and Triton build kernels with it.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.11,<2.16"
COPY pyproject.toml README.md LICENSE /source/
COPY shardwise /source/shardwise
COPY recipes /source/recipes
RUN pip install --no-cache-dir "/source[hf]" && rm -rf /source
WORKDIR /workspace
CMD ["shardwise", "--help"]
