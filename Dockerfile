# Two images of hotrow, with the same command line:
#
#   docker build --target gpu -t hotrow .          on the official Triton image, for NVIDIA GPUs
#   docker build --target cpu -t hotrow:cpu .      on a slim Python, with the tritonserver of the nvidia-pytriton wheel
#
# Give a digest instead of a tag if builds must repeat: --build-arg TRITON_IMAGE=…@sha256:…
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.08-py3
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
RUN python3 -m venv /build
COPY pyproject.toml README.md LICENSE ./
COPY hotrow hotrow
COPY inference_session inference_session
COPY triton_backend triton_backend
RUN /build/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS cpu
# nginx: for `hotrow serve --front`. Triton's stub is linked against Python's shared library; the virtual environment's python3 comes first on its PATH.
ENV PATH=/opt/hotrow/bin:$PATH NUMBA_CACHE_DIR=/var/cache/hotrow/kernels HOTROW_CACHE_DIR=/var/cache/hotrow \
    HOTROW_SHIPPED_KERNELS=/opt/hotrow-kernels
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends nginx-light && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home hotrow \
 && install -d -o hotrow -g hotrow /models /var/cache/hotrow /opt/hotrow-kernels \
 && python3 -m venv /opt/hotrow
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-compile "$(echo /wheels/hotrow-*.whl)[server,client,redis,rocksdb,hdfs,kafka]"
USER hotrow
# Compiled for the processor of the build; another one compiles when its first model is loaded. Not in the cache's
# folder, which volumes hide.
RUN NUMBA_CACHE_DIR=$HOTROW_SHIPPED_KERNELS python3 -m inference_session.execution.all_kernels
EXPOSE 8000 8001 8002
ENTRYPOINT ["hotrow"]
CMD ["serve", "--host", "0.0.0.0", "--repository", "/models"]

FROM ${TRITON_IMAGE} AS gpu
ENV NUMBA_CACHE_DIR=/var/cache/hotrow/kernels HOTROW_CACHE_DIR=/var/cache/hotrow HOTROW_SHIPPED_KERNELS=/opt/hotrow-kernels
RUN install -d -o 1000 -g 1000 /models /var/cache/hotrow /opt/hotrow-kernels
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-compile --break-system-packages \
    "$(echo /wheels/hotrow-*.whl)[client,redis,rocksdb,hdfs,kafka,gpu]" \
    # Both packages write the same files: install the one with CUDA last.
    && python3 -m pip install --no-cache-dir --no-compile --break-system-packages --force-reinstall --no-deps onnxruntime-gpu
# For users who start tritonserver without `hotrow serve`, which makes its own folder of backends.
RUN for backend in hotrow hugectr hps; do \
      cp -r "$(python3 -c 'import triton_backend; print(triton_backend.__path__[0])')/backends/$backend" /opt/tritonserver/backends/; \
    done
USER 1000
RUN NUMBA_CACHE_DIR=$HOTROW_SHIPPED_KERNELS python3 -m inference_session.execution.all_kernels
EXPOSE 8000 8001 8002
# Triton's own entry point prints a banner and runs what follows.
CMD ["hotrow", "serve", "--host", "0.0.0.0", "--repository", "/models"]
