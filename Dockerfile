# Not built yet: written from the package's own declarations and checked by reading alone.
# docker build -t octavo . && docker run --gpus=all -p 8000:8000 -v /models:/models:ro \
#     -e OCTAVO_API_KEY octavo --model=/models/my-model --host=0.0.0.0
# What it writes: /tmp (sockets between its processes) and the cache, so that --read-only
# --tmpfs=/tmp will do. Several GPUs: --shm-size=2g for NCCL.
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY . .
# An environment variable, so that it holds for what pip builds the package with as well.
ENV PIP_CONSTRAINT=/src/constraints.txt
RUN python -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir ".[serve,cuda13,tracing]"

FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 10001 octavo
COPY --from=build /opt/octavo /opt/octavo
# By number: Kubernetes can't tell that a name is not root's.
USER 10001:10001
ENV HOME=/home/octavo
WORKDIR /home/octavo
# Compiled programs and models from the Hub are kept here; a volume lets the next container start
# without compiling.
RUN mkdir -p /home/octavo/.cache
VOLUME /home/octavo/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# For --port=8000 without TLS; another needs --health-cmd or --no-healthcheck.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
    CMD ["/opt/octavo/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["/opt/octavo/bin/octavo", "serve"]
